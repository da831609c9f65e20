"""What stays eager beside the graphs of a model, and why."""

from collections.abc import Iterator

import torch

from megatron.core.transformer.module import GraphableMegatronModule

from ..report.record import EagerPart
from .layers import language_layers
from .stage import Stage
from .stage_graphs import StageGraphs

_OUTSIDE = "graphs hold layers only"


def eager_parts(stage: Stage, graphs: StageGraphs, whole_model_refused: str) -> Iterator[EagerPart]:
    """Say what has no graphs though layers of ``stage``, or all of it, have.

    Args:
        stage: What was captured.
        graphs: What there is of it now.
        whole_model_refused: Why the whole model was not captured; empty if --cuda-graph-layers-per-graph says so.
    """
    if graphs.models:
        what = "calls without labels or with tensors of other shapes"
        yield EagerPart(what, "graphs of the whole model do not fit them")
    else:
        yield from _beside_layers(stage, whole_model_refused)
    if not graphs.evaluation:
        yield EagerPart("evaluation", "only language models under Megatron-FSDP or torch's FSDP2 have graphs for it")
    for blocker in {each.blocker(): None for each in graphs.evaluation}:
        if blocker:
            yield EagerPart("evaluation", blocker)


def _beside_layers(stage: Stage, whole_model_refused: str) -> Iterator[EagerPart]:
    if whole_model_refused:
        yield EagerPart("the model as a whole", whole_model_refused)
    modules = " ".join(module.name for module in stage.config.cuda_graph_modules or ())
    if modules:
        yield EagerPart("all else in layers", f"--cuda-graph-modules names {modules} only")
    for number, chunk in enumerate(stage.chunks):
        where, model = f" of chunk {number}" if len(stage.chunks) > 1 else "", chunk.model
        for layer in language_layers(model):
            if layer not in chunk.layers:
                place = getattr(layer, "layer_number", "?")
                yield EagerPart(f"layer {place} ({type(layer).__name__}){where}", _why_eager(layer, modules))
        for name, module in () if model is None else _outside_layers(model):
            yield EagerPart(f"{name} ({type(module).__name__}){where}", _OUTSIDE)


def _why_eager(layer: torch.nn.Module, modules: str) -> str:
    if not isinstance(layer, GraphableMegatronModule):
        return "it is no GraphableMegatronModule"
    if modules:
        return f"--cuda-graph-modules {modules} selects nothing in it"
    return "it runs several times for one micro-batch"


def _outside_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules with parameters that are outside of layers, largest parts first."""
    for name, module in model.named_children():
        if name == "decoder":
            for inner, part in module.named_children():
                if inner != "layers" and any(True for _ in part.parameters()):
                    yield f"decoder.{inner}", part
        elif name != "mtp" and any(True for _ in module.parameters()):
            yield name, module
