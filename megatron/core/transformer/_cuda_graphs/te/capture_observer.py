"""Reports what a capture left: graphs by layer, memory pools, and parts that run eagerly."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..report import KINDS, Captured, CaptureRecorder, CaptureReport, Eager
from .capture_state import CaptureState, graphs_of, pools_of
from .layers import language_layers, layer_name, why_not_graphable
from .stage import Stage

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


def report_capture(
    stage: Stage, graphs: CaptureState, recorder: CaptureRecorder, whole_model_refused: str, number: int
) -> None:
    """Log the report of a capture on rank 0, and write it to ``--cuda-graph-report``.

    A failure is a warning: the graphs are worth more than their report.

    Args:
        graphs: The graphs of ``stage``; cached memory must have been released.
        whole_model_refused: Why the whole model was not captured; empty if --cuda-graph-layers-per-graph says so.
        number: The number of this capture, counted from 1; later ones have files of their own.
    """
    if graphs.eager_because or not recorder.active:
        return
    folder = getattr(stage.config, "cuda_graph_report", None)
    try:
        recorder.sample("end")
        report = _report(stage, graphs, recorder, whole_model_refused)
        logger.info(report.table())
        if folder is not None:
            name = stage.role.report if number == 1 else f"{stage.role.report}_{number}"
            files = report.write(Path(folder), name)
            logger.info(f"wrote the report on CUDA graphs to {' and '.join(map(str, files))}")
    except OSError as error:
        logger.warning(f"the report on CUDA graphs could not be written (--cuda-graph-report): {error}")
    except Exception as error:
        logger.warning("there will be no report on CUDA graphs", exc_info=error)


def _report(stage: Stage, graphs: CaptureState, recorder: CaptureRecorder, whole_model_refused: str) -> CaptureReport:
    def captured(timed_as: str, graphed: Sequence[Any], names: Sequence[str] = ()) -> Captured:
        every.extend(graphed)
        counts = Counter(
            kind for each in graphed for kind, graph in zip(KINDS, graphs_of(each), strict=True) if graph is not None
        )
        seconds = [recorder.seconds[timed_as, phase] for phase in ("warm-up", "capture")]
        return Captured(names or [timed_as], len(graphed), {kind: counts[kind] for kind in KINDS}, *seconds)

    every: list[Any] = []
    parts: list[Captured] = []
    if graphs.models:
        for index, model in enumerate(graphs.models):
            name = "the whole model" if stage.one_graph_serves_all else f"chunk {index}"
            parts.append(captured(name, model.slots))
    else:
        if graphs.decoder is not None:
            names = [layer_name(layer, index) for index, layer in enumerate(graphs.decoder.module.layers)]
            parts.append(captured("the decoder", [graphs.decoder.passes], names))
        layers = [layer for own in graphs.layers_apart for layer in own]
        for index, layer in enumerate(layers):
            graphed = [getattr(graph, "graphed", graph) for graph in layer.cuda_graphs]
            parts.append(captured(layer_name(layer, index), graphed))
    wrappers = [chunk.fsdp for chunk in stage.chunks if chunk.fsdp is not None]
    return CaptureReport(
        bool(graphs.models),
        parts,
        collectives=sum(fsdp.graphs.recorded_collectives() for fsdp in wrappers),
        seconds={
            "total": recorder.total,
            "warm_up": sum(part.warm_up_seconds for part in parts),
            "capture": sum(part.capture_seconds for part in parts),
            "waiting": recorder.waited,
        },
        memory=recorder.memory,
        pools=pools_of(every),
        eager=list(eager_parts(stage, graphs, whole_model_refused)),
    )


def eager_parts(stage: Stage, graphs: CaptureState, whole_model_refused: str) -> Iterator[Eager]:
    """Yield what runs eagerly, and why; see ``report_capture`` for the arguments."""
    if graphs.models:
        yield Eager("calls without labels or with tensors of other shapes", "graphs of the whole model do not fit them")
    else:
        yield from _beside_layers(stage, whole_model_refused)
    if not graphs.models:
        yield Eager("evaluation", "only whole models have a graph for it")


def _beside_layers(stage: Stage, whole_model_refused: str) -> Iterator[Eager]:
    if whole_model_refused:
        yield Eager("the model as a whole", whole_model_refused)
    modules = " ".join(module.name for module in stage.config.cuda_graph_modules or ())
    if modules:
        yield Eager("everything else in layers", f"--cuda-graph-modules names only {modules}")
    for number, chunk in enumerate(stage.chunks):
        where, model = f" of chunk {number}" if len(stage.chunks) > 1 else "", chunk.model
        once = chunk.every_layer
        for layer in language_layers(model):
            if layer not in chunk.layers:
                place = getattr(layer, "layer_number", "?")
                why = why_not_graphable(layer, stage.config) or (
                    "_discover_layers leaves it out" if layer in once else "it runs several times per micro-batch"
                )
                yield Eager(f"layer {place} ({type(layer).__name__}){where}", why)
        for name, module in () if model is None else _outside_layers(model):
            yield Eager(f"{name} ({type(module).__name__}){where}", "graphs hold layers only")


def _outside_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules with parameters that are outside of layers."""
    for name, module in model.named_children():
        parts = [(name, module)] if name not in ("decoder", "mtp") else []
        if name == "decoder":
            parts = [(f"decoder.{inner}", part) for inner, part in module.named_children() if inner != "layers"]
        yield from (part for part in parts if any(True for _ in part[1].parameters()))
