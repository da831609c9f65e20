"""The parts of a pipeline stage, and which of them run in graphs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.transformer._cuda_graphs.flags.options import Options
from megatron.core.transformer._cuda_graphs.te.graph_choice import Choice, Holds
from megatron.core.transformer._cuda_graphs.te.helper import TECudaGraphHelper
from megatron.core.transformer._cuda_graphs.te.layers import _modules_of

from .capture import why_nothing

# By the value of --cuda-graph-modules that selects them.
NAMES = {
    "attn": "attention, with the norm before it",
    "mlp": "MLP of dense layers, with the norm before it",
    "moe_router": "router, with the norm before it",
    "moe_preprocess": "preparation of the dispatch to experts",
    "moe": "experts, with the exchange of tokens",
    "mamba": "Mamba mixer, with the norm before it",
}
SHARED = "shared experts"
OUTSIDE = "outside of layers, and graphs hold layers"
WHOLE = "in the graphs of the whole model"
REPEATED = "it runs several times for a micro-batch, and would overwrite its activations"


@dataclass(frozen=True)
class Part:
    """A kind of module.

    Attributes:
        module: The value of ``--cuda-graph-modules`` that selects it; None for what is outside of layers.
    """

    name: str
    count: int
    graphed: bool
    why: str
    module: str | None = None


def parts_of(helper: TECudaGraphHelper, choice: Choice) -> list[Part]:
    """Return the parts of the stage of ``helper``, in the order in which they run.

    Args:
        helper: Of a model that has not been captured.
        choice: What graphs are to hold.
    """
    whole_model = choice.holds is Holds.MODEL
    models = [chunk.model for chunk in helper.stage.chunks if chunk.model is not None]
    every = [layer for chunk in helper.stage.chunks for layer in chunk.every_layer]
    found = _outside("embedding", _count(models, "embedding"), whole_model)
    found += _parts_of_layers(helper, every, choice)
    predicting = sum(hasattr(model, "mtp") for model in models)
    if predicting:
        if helper.config.mtp_use_repeated_layer and helper.config.mtp_num_layers > 1:
            why = WHOLE if whole_model else REPEATED
            found.append(Part("repeated layer of multi-token prediction", predicting, whole_model, why))
        found += _outside("multi-token prediction outside of its layers", predicting, whole_model)
    decoders = [model.decoder for model in models]
    norms = _count(decoders, "final_layernorm") + _count(decoders, "final_norm")  # the latter in hybrid models
    found += _outside("final norm", norms, whole_model)
    return found + _outside("output layer and losses", _count(models, "output_layer"), whole_model)


def _outside(name: str, count: int, whole_model: bool) -> list[Part]:
    return [Part(name, count, whole_model, WHOLE if whole_model else OUTSIDE)] if count else []


def _count(models: list[Any], name: str) -> int:
    return sum(getattr(model, name, None) is not None for model in models)


def _parts_of_layers(helper: TECudaGraphHelper, every: list[torch.nn.Module], choice: Choice) -> Iterator[Part]:
    options, whole_model = Options(helper.config), choice.holds is Holds.MODEL
    reason = why_nothing(helper, choice)
    graphable = {*(() if reason else helper.flattened_callables)}
    layers_of: dict[str, list[torch.nn.Module]] = {}
    for layer in every:
        for module in _modules_of(layer):
            layers_of.setdefault(module.name, []).append(layer)
    for module, name in NAMES.items():
        layers = layers_of.get(module, [])
        if not layers:
            continue
        chosen = options.graphs(module, *(("moe",) if module.startswith("moe_") else ()))
        graphed = chosen and graphable.issuperset(layers)
        why = _why(module, options, chosen, graphed, whole_model)
        yield Part(name, len(layers), graphed, reason if reason and chosen else why, module)
        shared = sum(getattr(getattr(layer, "mlp", None), "shared_experts", None) is not None for layer in layers)
        if module == "moe_router" and shared:
            yield _shared_experts(helper, options, shared, whole_model)


def _why(module: str, options: Options, chosen: bool, graphed: bool, whole_model: bool) -> str:
    if whole_model:
        return WHOLE
    if graphed and not options.modules:
        return "whole layers are captured"
    if graphed:
        return f"--cuda-graph-modules has {module if module in options.modules else 'moe'}"
    if not chosen:
        return f"--cuda-graph-modules is {' '.join(sorted(options.modules))}, without {module}"
    return "not all of these layers can be captured"


def _shared_experts(helper: TECudaGraphHelper, options: Options, count: int, whole_model: bool) -> Part:
    with_router = options.graphs("moe_router") and not helper.config.moe_shared_expert_overlap
    if options.graphs("moe"):
        return Part(SHARED, count, True, WHOLE if whole_model else "with the experts", "moe")
    if with_router:
        return Part(SHARED, count, True, "with the router", "moe_router")
    overlaps = options.graphs("moe_router")
    why = (
        "--moe-shared-expert-overlap lets them run beside the dispatch, after the router's graph"
        if overlaps
        else f"--cuda-graph-modules is {' '.join(sorted(options.modules))}, without moe_router"
    )
    return Part(SHARED, count, False, why, "moe" if overlaps else "moe_router")
