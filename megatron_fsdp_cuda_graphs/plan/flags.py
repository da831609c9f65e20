"""Reads the flags of a training as its ranks would, and collects what is said against them."""

import argparse
import io
import math
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from typing import Any

from megatron.core.transformer._cuda_graphs.flags.options import Options
from megatron.core.transformer._cuda_graphs.flags.table import Verdict, rows_of
from megatron.training import arguments as megatron_arguments

from ..overlay import upstream
from .quiet import quietly


@dataclass
class Flags:
    """Flags of a training, checked.

    Attributes:
        args: Megatron's parsed arguments; validated, and complete, only if nothing is refused.
        refused: Why no job would start, each with the flag and what to do.
        remarks: What has no effect or was not tried.
    """

    args: argparse.Namespace
    refused: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def verdict(self) -> Iterator[str]:
        """Yield lines that say whether the flags fit together, and of what job they are."""
        yield "The flags do not fit together:" if self.refused else "The flags fit together."
        yield from bulleted(self.refused)
        if self.remarks:
            yield from ("", "Remarks:", *bulleted(self.remarks))
        if self.refused:
            return
        args = self.args
        sizes = {
            "data": args.data_parallel_size,
            "tensor": args.tensor_model_parallel_size,
            "pipeline": args.pipeline_model_parallel_size,
            "context": args.context_parallel_size,
            "expert": args.expert_model_parallel_size,
        }
        yield f"Ranks: {args.world_size} (--world-size); parallel: {', '.join(f'{k} {v}' for k, v in sizes.items())}"


def bulleted(texts: Sequence[str]) -> list[str]:
    """Return ``texts`` as items of a list."""
    return [f"- {text}" for text in texts]


def read_flags(arguments: Sequence[str], world_size: int | None) -> Flags:
    """Parse and check flags, as ``validate_args`` does; all that is refused is collected.

    Args:
        arguments: Flags as ``pretrain_gpt`` takes them.
        world_size: Ranks of the job; None for as few as the parallel sizes allow.

    Raises:
        SystemExit: with 2, after argparse's message: a flag is unknown, or has a value that it does not take.
    """
    args = _parse(arguments)
    fewest = smallest_world(args)
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


def smallest_world(args: argparse.Namespace) -> int:
    """Return the fewest ranks that have room for the parallel sizes, in each instance of hybrid sharding."""
    dense = args.tensor_model_parallel_size * args.context_parallel_size
    experts = (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) * args.expert_model_parallel_size
    of_stage = math.lcm(dense, experts if args.num_experts else 1) * args.num_distributed_optimizer_instances
    return of_stage * args.pipeline_model_parallel_size


def said_by(error: BaseException) -> str:
    """Return the message of ``error``; of an assertion without one, the flag it asks for, or what it asserts."""
    if str(error):
        return f"{error}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    missing = re.fullmatch(r"assert args\.(\w+) is not None", last.line or "")
    if missing:
        return f"--{missing[1].replace('_', '-')} is required"
    return f"{type(error).__name__}: {last.line}"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    argv, environment, said = sys.argv, dict(os.environ), io.StringIO()
    sys.argv = ["pretrain_gpt", *arguments]
    os.environ.update(RANK="0", LOCAL_RANK="0")
    try:
        with redirect_stderr(said):
            args: Any = megatron_arguments.parse_args()
    except SystemExit:
        _, error, message = said.getvalue().partition("pretrain_gpt: error: ")  # without the usage, of all flags
        print(error + message, end="", file=sys.stderr)
        raise
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)
    return args
