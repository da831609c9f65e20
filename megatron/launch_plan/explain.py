"""``python -m megatron_fsdp_cuda_graphs explain``: why each part of a model runs in graphs or eagerly."""

import argparse
from collections.abc import Iterator, Sequence

from .command import need_no_gpu, not_built, own_arguments


def main(arguments: Sequence[str]) -> int:
    """Print the parts. Returns the exit code: 0 if the flags fit together, 1 if not, 2 if nothing can be said."""
    try:
        own, given = own_arguments("explain", "Say which parts of a model flags would put in graphs.", arguments)
        need_no_gpu()
        from .flags import read_flags
        from .plan import captures_layers, other_graphs, verdict

        flags = read_flags(given, own.world_size)
    except SystemExit as end:
        return int(end.code or 0)
    if flags.refused:
        print("\n".join(verdict(flags)))
        return 1
    if not captures_layers(flags.args):
        print(other_graphs(flags.args) or "There are no graphs to explain: --cuda-graph-impl is none; see plan.")
        return 0
    try:
        lines = list(_lines(given, flags.args))
    except Exception as error:
        return not_built(error)
    print("\n".join(lines))
    return 0


def _lines(given: Sequence[str], args: argparse.Namespace) -> Iterator[str]:
    from .dry_stage import parts_of_stage

    remedies: dict[str | None, str] = {}
    for stage in range(args.pipeline_model_parallel_size):
        parts = parts_of_stage(args, stage)
        yield f"Pipeline stage {stage + 1} of {args.pipeline_model_parallel_size}"
        for part in parts:
            yield f"  {'graphed' if part.graphed else 'eager':8} {part.name} ({part.count}): {part.why}"
            if not part.graphed:
                if part.module not in remedies:
                    remedies[part.module] = _remedy(part.module, given, args)
                yield f"{'':11}to graph it: {remedies[part.module]}"


def _remedy(module: str | None, given: Sequence[str], args: argparse.Namespace) -> str:
    from . import changes
    from .dry_stage import whole_model_blocker

    if module is not None:
        change = changes.to_graph(module, given, args)
        return change.words if change is not None else "no change of flags is known that the checks accept"
    change = changes.to_graph_all(given, args, whole_model_blocker)
    return change.words if change is not None else f"not possible: {whole_model_blocker(args, whole_layers=True)}"
