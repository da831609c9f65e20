"""The output of ``plan`` and ``explain``. Imported once the CPU backend is installed."""

import argparse
import sys
from collections.abc import Iterator, Sequence

from .command import quietly
from .dry_stage import UnknownVocabularyError, blocker_elsewhere, dry_stage, whole_model_blocker
from .flags import Flags, change_to_graph, change_to_graph_all, read_flags, said_by, without
from .graphs import Part, choice_of, parts_of, planned
from .memory import stage_memory

SHOWN = 12  # graphs of a stage, without --every-graph
NOT_COUNTED = (
    "Not counted: activations outside of graphs, outputs of graphs, what kernels and NCCL take, fragmentation, and the "
    "CUDA context. Estimates are marked so; all else is the size of tensors that Megatron-FSDP makes for these flags."
)


def show(command: str, own: argparse.Namespace, given: list[str]) -> int:
    """Print the output of a command and return its exit code.

    Args:
        own: The arguments of the command.
        given: The flags of the training.

    Raises:
        SystemExit: 2: a flag is unknown or has a wrong value.
    """
    flags = read_flags(given, own.world_size)
    if flags.refused:
        print("\n".join(_verdict(flags)))
        return 1
    lines = _plan if command == "plan" else _explain
    try:
        print("\n".join(list(lines(own, given, flags))))
    except UnknownVocabularyError as error:
        print(error, file=sys.stderr)
        return 2
    except Exception as error:
        print(f"megatron-core cannot build the model here: {said_by(error)}", file=sys.stderr)
        return 2 if isinstance(error, ImportError) else 1
    return 0


def _plan(own: argparse.Namespace, given: list[str], flags: Flags) -> Iterator[str]:
    args = flags.args
    yield from _verdict(flags)
    if args.cuda_graph_impl != "transformer_engine":
        yield from (_other_graphs(args), "", "Flags to add or drop:")
        if args.cuda_graph_impl == "none":
            changed = [*without(given, "--cuda-graph-impl"), "--cuda-graph-impl", "transformer_engine"]
            yield "- --cuda-graph-impl transformer_engine: layers as graphs"
            yield from _bulleted(read_flags(changed, args.world_size).refused)
        else:
            yield "- none"
        return
    elsewhere = blocker_elsewhere(args)
    for stage in range(args.pipeline_model_parallel_size):
        with quietly(), dry_stage(args, stage) as helper:
            graphs = planned(helper, choice_of(helper, elsewhere))
            memory = list(stage_memory(helper, graphs, args))
        yield from ("", f"Pipeline stage {stage + 1} of {args.pipeline_model_parallel_size}")
        if graphs.why_nothing:
            yield f"  Nothing would be captured: {graphs.why_nothing}."
        else:
            count = len(graphs.graphs)
            yield f"  Order of passes: {' '.join(f'{step:g}' for step in graphs.order)} (chunk, minus for backward)"
            yield f"  Graphs: {count}, captured in this order:"
            shown = count if own.every_graph else SHOWN
            yield from (f"    {graph}" for graph in graphs.graphs[:shown])
            if count > shown:
                yield f"    and {count - shown} more (--every-graph lists them)"
        yield from ("  Memory of a rank, MiB:", *memory)
    yield from ("", NOT_COUNTED, "", "Flags to add or drop:")
    parts: dict[str, dict[str, None]] = {}  # names by the change that graphs them
    for own_parts in _parts(given, args):
        for part, change in own_parts:
            if change:
                parts.setdefault(change, {})[part.name] = None
    yield from _bulleted([f"to graph {'; '.join(names)}: {change}" for change, names in parts.items()] or ["none"])


def _explain(own: argparse.Namespace, given: list[str], flags: Flags) -> Iterator[str]:
    args = flags.args
    if args.cuda_graph_impl != "transformer_engine":
        yield _other_graphs(args)
        return
    for stage, parts in enumerate(_parts(given, args), start=1):
        yield f"Pipeline stage {stage} of {args.pipeline_model_parallel_size}"
        for part, change in parts:
            yield f"  {'graphed' if part.graphed else 'eager':8} {part.name} ({part.count}): {part.why}"
            if change:
                yield f"{'':11}to graph it: {change}"


def _parts(given: list[str], args: argparse.Namespace) -> Iterator[list[tuple[Part, str]]]:
    """Yield the parts of each pipeline stage, each with the change that graphs it; empty if it is graphed."""
    elsewhere = blocker_elsewhere(args)
    changes: dict[str | None, str] = {}
    for stage in range(args.pipeline_model_parallel_size):
        with quietly(), dry_stage(args, stage) as helper:
            parts = list(parts_of(helper, choice_of(helper, elsewhere)))
        for module in {part.module: None for part in parts if not part.graphed}.keys() - changes.keys():
            if module is not None:
                found = change_to_graph(module, given, args)
                changes[module] = found or "no change of flags is known that the checks accept"
            else:
                found = change_to_graph_all(given, args, whole_model_blocker)
                changes[None] = found or f"not possible: {whole_model_blocker(args, whole_layers=True)}"
        yield [(part, "" if part.graphed else changes[part.module]) for part in parts]


def _verdict(flags: Flags) -> Iterator[str]:
    yield "The flags do not fit together:" if flags.refused else "The flags fit together."
    yield from _bulleted(flags.refused)
    if flags.remarks:
        yield from ("", "Remarks:", *_bulleted(flags.remarks))
    if not flags.refused:
        args = flags.args
        names = ("tensor_model", "pipeline_model", "context", "expert_model")
        sizes = {name.removesuffix("_model"): getattr(args, f"{name}_parallel_size") for name in ("data", *names)}
        parallel = ", ".join(f"{name} {size}" for name, size in sizes.items())
        yield f"Ranks: {args.world_size} (--world-size); parallel: {parallel}"


def _other_graphs(args: argparse.Namespace) -> str:
    if args.cuda_graph_impl == "none":
        return "No layer would be captured: --cuda-graph-impl is none."
    return f"These commands know only graphs of --cuda-graph-impl transformer_engine, not of {args.cuda_graph_impl}."


def _bulleted(texts: Sequence[str]) -> list[str]:
    return [f"- {text}" for text in texts]
