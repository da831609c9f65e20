"""``python -m megatron_fsdp_cuda_graphs explain``: why each part of a model runs in graphs or eagerly."""

import argparse
from collections.abc import Iterator, Sequence

from .changes import to_graph, to_graph_all
from .dry_stage import parts_of_stages, whole_model_blocker
from .flags import Flags
from .plan import captures_layers, other_graphs


def lines(own: argparse.Namespace, given: list[str], flags: Flags) -> Iterator[str]:
    """Yield the parts of each pipeline stage; see ``command``."""
    args = flags.args
    if not captures_layers(args):
        yield other_graphs(args) or "There are no graphs to explain: --cuda-graph-impl is none; see plan."
        return
    remedies: dict[str | None, str] = {}
    for stage, parts in enumerate(parts_of_stages(args), start=1):
        yield f"Pipeline stage {stage} of {args.pipeline_model_parallel_size}"
        for part in parts:
            yield f"  {'graphed' if part.graphed else 'eager':8} {part.name} ({part.count}): {part.why}"
            if not part.graphed:
                if part.module not in remedies:
                    remedies[part.module] = _remedy(part.module, given, args)
                yield f"{'':11}to graph it: {remedies[part.module]}"


def _remedy(module: str | None, given: Sequence[str], args: argparse.Namespace) -> str:
    if module is not None:
        change = to_graph(module, given, args)
        return change.words if change is not None else "no change of flags is known that the checks accept"
    change = to_graph_all(given, args, whole_model_blocker)
    return change.words if change is not None else f"not possible: {whole_model_blocker(args, whole_layers=True)}"
