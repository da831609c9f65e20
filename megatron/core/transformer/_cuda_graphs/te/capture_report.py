"""Report of a capture: graphs per layer, memory pools, and eager parts of the model."""

import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ..engine.memory import PoolMemory
from .capture_state import CaptureScope, CaptureState, Holds, Status
from .layers import language_layers, layer_name, why_not_graphable
from .stage import Stage

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

_NOT_CAPTURED = "it runs several times per micro-batch, or _discover_layers omits it"
KINDS = ("forward", "backward", "weight-gradient")


def report_capture(stage: Stage, graphs: CaptureState, started: float, number: int) -> None:
    """Log the graphs of ``stage`` on rank 0, and write them as JSON to the directory of ``--cuda-graph-report``.

    Args:
        graphs: The captured graphs; cached memory must have been released.
        started: ``time.time()`` at the start of the capture.
        number: The 1-based number of this capture. Each capture writes its own file.
    """
    if graphs.status is not Status.CAPTURED or torch.distributed.get_rank() != 0:
        return
    report = _report(stage, graphs, time.time() - started)
    logger.info("\n  ".join(_lines(report)))
    folder = getattr(stage.config, "cuda_graph_report", None)
    if folder is None:
        return
    file = Path(folder, f"{stage.role.report}{'' if number == 1 else f'_{number}'}.json")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        logger.warning(f"the report on CUDA graphs could not be written (--cuda-graph-report): {error}")


def _report(stage: Stage, graphs: CaptureState, seconds: float) -> dict[str, Any]:
    every: list[Any] = []

    def captured(names: Sequence[str], graphed: Sequence[Any]) -> dict[str, Any]:
        every.extend(graphed)
        pairs = (pair for each in graphed for pair in zip(KINDS, _graphs_of(each), strict=True))
        counts = Counter(kind for kind, graph in pairs if graph is not None)
        return {"names": names, "graphs": {kind: counts[kind] for kind in KINDS}}

    parts = [
        captured(["the whole model" if stage.one_graph_serves_all else f"chunk {index}"], model.slots)
        for index, model in enumerate(graphs.models)
    ]
    if graphs.decoder is not None:
        names = [layer_name(layer, index) for index, layer in enumerate(graphs.decoder.module.layers)]
        parts.append(captured(names, graphs.decoder.slots))
    if not graphs.models:
        for index, layer in enumerate(layer for own in graphs.layers_apart for layer in own):
            parts.append(captured([layer_name(layer, index)], [graph.graphed for graph in layer.cuda_graphs]))
    wrappers = [chunk.fsdp for chunk in stage.chunks if chunk.fsdp is not None]
    return {
        "captured": parts,
        "collectives": sum(fsdp.graphs.recorded_collectives() for fsdp in wrappers),
        "seconds": seconds,
        "pools": [{"graphs": count, "bytes": size} for count, size in _pools_of(every)],
        "eager": [{"what": what, "why": why} for what, why in eager_parts(stage, graphs.scope)],
    }


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"Captured CUDA graphs in {report['seconds']:.2f} s:"
    for _, run in groupby(report["captured"], lambda part: (len(part["names"]), part["graphs"])):
        parts = list(run)
        names = [name for part in parts for name in part["names"]]
        what = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        counts = ", ".join(f"{sum(part['graphs'][kind] for part in parts)} {kind}" for kind in KINDS)
        yield f"{what}{', in one graph' if len(parts[0]['names']) > 1 else ''}: {counts}"
    if report["collectives"]:
        yield f"{report['collectives']} graphs of collectives"
    for pool in report["pools"]:
        yield f"{pool['graphs']} graphs in a memory pool of {pool['bytes'] / 2**20:,.1f} MiB"
    for part in report["eager"]:
        yield f"eager: {part['what']}, because {part['why']}"


def eager_parts(stage: Stage, scope: CaptureScope) -> Iterator[tuple[str, str]]:
    """Yield ``(part, reason)`` for each part of the model, or kind of call, that runs eagerly despite the graphs."""
    if scope.holds is Holds.MODEL:
        yield "calls without labels or with tensors of other shapes", "graphs of the whole model do not match them"
        return
    if scope.not_model:
        yield "the model as a whole", scope.not_model
    yield "modules outside of layers", "graphs contain layers only"
    if modules := " ".join(module.name for module in stage.config.cuda_graph_modules or ()):
        yield "everything else in layers", f"--cuda-graph-modules names only {modules}"
    for number, chunk in enumerate(stage.chunks):
        where = f" of chunk {number}" if len(stage.chunks) > 1 else ""
        for index, layer in enumerate(language_layers(chunk.model)):
            if layer not in chunk.layers:
                why = why_not_graphable(layer, stage.config) or _NOT_CAPTURED
                yield f"{layer_name(layer, index)}{where}", why
    yield "evaluation", "only a whole model is captured for evaluation"


def _pools_of(graphed: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the number of graphs and the size in bytes of each memory pool used by the engine's callables."""
    of_pool: dict[tuple, list[torch.cuda.CUDAGraph]] = {}
    for each in graphed:
        for graph in filter(None, _graphs_of(each)):
            of_pool.setdefault(tuple(graph.pool()), []).append(graph)
    return [(len(own), PoolMemory.of(own[0]).size()) for own in of_pool.values()]


def _graphs_of(graphed: Any) -> list[torch.cuda.CUDAGraph | None]:
    """Return the callable's forward, backward and weight-gradient graphs, with None for each missing graph."""
    names = ("forward_graph", "backward_graph", "weight_gradient_graph")
    return [getattr(graphed, name, None) for name in names]
