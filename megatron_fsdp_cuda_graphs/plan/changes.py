"""Changes of flags that put more into graphs, each tried against all checks before it is proposed."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core.transformer._cuda_graphs.flags.options import GROUPED_FLAG, LAYERS_FLAG, WHOLE_MODEL, Options

from .flags import read_flags

MODULES = "--cuda-graph-modules"
PER_LAYER = ("--cuda-graph-impl", "transformer_engine")
PADDING = ("--moe-pad-expert-input-to-capacity", "--moe-expert-capacity-factor", "1.0")
# Values of --cuda-graph-modules that cannot stand together with, or without, another.
_EXCLUDED = {"moe": ("moe_router", "moe_preprocess"), "moe_router": ("moe",), "moe_preprocess": ("moe",)}
_NEEDED = {"moe_preprocess": ("moe_router",)}


@dataclass(frozen=True)
class Change:
    """A change of flags."""

    words: str
    arguments: Sequence[str]


def without(arguments: Sequence[str], flag: str) -> list[str]:
    """Return ``arguments`` without a flag and its values."""
    kept, dropping = [], False
    for argument in arguments:
        if argument.startswith("--"):
            dropping = argument.partition("=")[0] == flag
        if not dropping:
            kept.append(argument)
    return kept


def accepted(change: Change, args: argparse.Namespace) -> argparse.Namespace | None:
    """Return the validated arguments after ``change``; None if a check refuses them.

    Args:
        args: Arguments with the ranks of the job.
    """
    flags = read_flags(change.arguments, args.world_size)
    return None if flags.refused else flags.args


def to_graph(module: str, arguments: Sequence[str], args: argparse.Namespace) -> Change | None:
    """Return the smallest known change with which graphs hold a part of layers; None if every one is refused.

    Args:
        module: The part's value of ``--cuda-graph-modules``.
    """
    for change in _candidates(module, arguments, Options(args).modules):
        after = accepted(change, args)
        if after is not None and Options(after).graphs(module):
            return change
    return None


def to_graph_all(
    arguments: Sequence[str], args: argparse.Namespace, blocker: Callable[[argparse.Namespace], str]
) -> Change | None:
    """Return the smallest known change with which a graph holds the whole model; None if there is none.

    Args:
        blocker: Returns why the whole model cannot be captured with given arguments; empty if it can.
    """
    words, rest = [], [*arguments]
    given = {MODULES: Options(args).modules, LAYERS_FLAG: args.cuda_graph_layers_per_graph is not None}
    for flag, is_given in given.items():
        if is_given:
            words.append(f"drop {flag}")
            rest = without(rest, flag)
    if not args.cuda_graph_warmup_steps:  # without a step before capture the model is captured if asked for
        words.append(f"add {LAYERS_FLAG} {WHOLE_MODEL}")
        rest += (LAYERS_FLAG, WHOLE_MODEL)
    for added in ((), (GROUPED_FLAG,)):
        change = Change(", ".join([*words, *(f"add {flag}" for flag in added)]), [*rest, *added])
        after = accepted(change, args) if change.words else None
        if after is not None and not blocker(after):
            return change
    return None


def _candidates(module: str, arguments: Sequence[str], modules: frozenset[str]) -> Iterator[Change]:
    """Yield changes that may put ``module`` into graphs, the smaller first."""
    rest = without(arguments, MODULES)
    drop = Change(f"drop {MODULES}", rest)
    padding = " ".join(PADDING)
    if modules:
        kept = modules.difference(_EXCLUDED.get(module, ()))
        chosen = sorted({*kept, module, *_NEEDED.get(module, ())})
        named = Change(f"{MODULES} {' '.join(chosen)}", [*rest, MODULES, *chosen])
        yield named
        yield drop
        yield Change(f"{drop.words}, add {GROUPED_FLAG}", [*rest, GROUPED_FLAG])
        yield Change(f"{named.words} {padding}", [*named.arguments, *PADDING])
        yield Change(f"{drop.words}, add {padding}", [*rest, *PADDING])
    else:
        yield Change(f"add {GROUPED_FLAG}", [*rest, GROUPED_FLAG])
        yield Change(f"add {padding}", [*rest, *PADDING])
