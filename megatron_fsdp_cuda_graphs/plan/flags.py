"""Reads and checks the flags of a training without starting it, and searches changes of flags that capture more."""

import argparse
import io
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from typing import Any

from megatron.core.transformer._cuda_graphs.flags.options import GROUPED_FLAG, LAYERS_FLAG, WHOLE_MODEL, Options
from megatron.core.transformer._cuda_graphs.flags.table import Verdict, rows_of
from megatron.training import arguments as megatron_arguments

from ..overlay import upstream
from .command import quietly

MODULES = "--cuda-graph-modules"
_PADDING = ("--moe-pad-expert-input-to-capacity", "--moe-expert-capacity-factor", "1.0")
# Values of --cuda-graph-modules that cannot stand together with, or without, another.
_EXCLUDED = {"moe": ("moe_router", "moe_preprocess"), "moe_router": ("moe",), "moe_preprocess": ("moe",)}
_NEEDED = {"moe_preprocess": ("moe_router",)}


@dataclass
class Flags:
    """The checked flags of a training.

    Attributes:
        args: Megatron's parsed arguments; complete only if nothing is refused.
        refused: Why no job would start: the flags, and what to do.
        remarks: Flags without effect, or not tried.
    """

    args: argparse.Namespace
    refused: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def read_flags(arguments: Sequence[str], world_size: int | None) -> Flags:
    """Parse and check flags, as ``validate_args`` does; all that is refused is collected.

    Args:
        world_size: Ranks of the job; None for as few as the parallel sizes allow.

    Raises:
        SystemExit: 2, after argparse's message: a flag is unknown or has a wrong value.
    """
    args = _parse(arguments)
    fewest = _smallest_world(args)
    args.world_size = world_size or fewest
    flags = Flags(args)
    if args.world_size % fewest:
        flags.refused.append(
            f"--world-size {args.world_size}: the parallel sizes and --num-distributed-optimizer-instances need a "
            f"multiple of {fewest} ranks"
        )
    try:
        with quietly():
            upstream("megatron.training.arguments").validate_args(args, {})
    except (Exception, SystemExit) as error:
        flags.refused.append(f"megatron-core: {said_by(error)}")
    options = Options(args)
    flags.refused += options.problems()
    for row in rows_of(options):
        (flags.refused if row.verdict is Verdict.REFUSED else flags.remarks).append(row.words)
    return flags


def said_by(error: BaseException) -> str:
    """Return the message of ``error``; for a bare assertion, the missing flag or the asserted line."""
    if str(error):
        return f"{error}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    missing = re.fullmatch(r"assert args\.(\w+) is not None", last.line or "")
    return f"--{missing[1].replace('_', '-')} is required" if missing else f"{type(error).__name__}: {last.line}"


def without(arguments: Sequence[str], flag: str) -> list[str]:
    """Return ``arguments`` without a flag and its values."""
    kept, dropping = [], False
    for argument in arguments:
        if argument.startswith("--"):
            dropping = argument.partition("=")[0] == flag
        if not dropping:
            kept.append(argument)
    return kept


def change_to_graph(module: str, arguments: Sequence[str], args: argparse.Namespace) -> str | None:
    """Return the smallest known change of flags that graphs a part of layers; None if every one is refused.

    Args:
        module: The part's value of ``--cuda-graph-modules``.
        arguments: The flags.
        args: The same, validated.
    """
    rest, given = without(arguments, MODULES), Options(args).modules
    added = [[GROUPED_FLAG], [*_PADDING]]
    changes = [(f"add {' '.join(flags)}", [*rest, *flags]) for flags in added]
    if given:
        kept = given.difference(_EXCLUDED.get(module, ()))
        named = [MODULES, *sorted({*kept, module, *_NEEDED.get(module, ())})]
        changes = [(f"drop {MODULES}, {words}", flags) for words, flags in changes]
        changes.insert(1, (" ".join([*named, *_PADDING]), [*rest, *named, *_PADDING]))
        changes[:0] = [(" ".join(named), [*rest, *named]), (f"drop {MODULES}", rest)]
    for words, flags in changes:
        after = read_flags(flags, args.world_size)
        if not after.refused and Options(after.args).graphs(module):
            return words
    return None


def change_to_graph_all(
    arguments: Sequence[str], args: argparse.Namespace, blocker: Callable[[argparse.Namespace], str]
) -> str | None:
    """Return the smallest known change of flags that graphs the whole model; None if there is none.

    Args:
        blocker: Returns why the whole model cannot be captured with given arguments; empty if it can.
    """
    words, rest = [], [*arguments]
    given = {MODULES: Options(args).modules, LAYERS_FLAG: args.cuda_graph_layers_per_graph is not None}
    for flag in (flag for flag, is_given in given.items() if is_given):
        words.append(f"drop {flag}")
        rest = without(rest, flag)
    if not args.cuda_graph_warmup_steps:  # without a step before capture the model is captured only on request
        words.append(f"add {LAYERS_FLAG} {WHOLE_MODEL}")
        rest += (LAYERS_FLAG, WHOLE_MODEL)
    for added in ([], [GROUPED_FLAG]):
        change = ", ".join([*words, *(f"add {flag}" for flag in added)])
        after = read_flags([*rest, *added], args.world_size)
        if change and not after.refused and not blocker(after.args):
            return change
    return None


def _smallest_world(args: argparse.Namespace) -> int:
    """Return the smallest number of ranks for the parallel sizes."""
    dense = args.tensor_model_parallel_size * args.context_parallel_size
    experts = (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) * args.expert_model_parallel_size
    of_stage = math.lcm(dense, experts if args.num_experts else 1) * args.num_distributed_optimizer_instances
    return of_stage * args.pipeline_model_parallel_size


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    argv, environment, said = sys.argv, dict(os.environ), io.StringIO()
    sys.argv = ["pretrain_gpt", *arguments]
    os.environ.update(RANK="0", LOCAL_RANK="0")
    try:
        with redirect_stderr(said):
            args: Any = megatron_arguments.parse_args()
    except SystemExit:
        _, error, message = said.getvalue().partition("pretrain_gpt: error: ")  # without the usage of all flags
        print(error + message, end="", file=sys.stderr)
        raise
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)
    return args
