"""Find the layers of a model that can run as CUDA graphs."""

from collections.abc import Iterator
from typing import Any

import torch

from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.utils import get_attr_wrapped_model

from ..errors import UnsupportedError
from ..flags.options import LAYERS_FLAG, WHOLE_MODEL


def language_model_of(chunk: torch.nn.Module) -> Any | None:
    """Unwrap a model chunk to the module that has a ``decoder``; return None in a stage without layers."""
    try:
        return get_attr_wrapped_model(chunk, "decoder", allow_none=False, return_model_obj=True)
    except RuntimeError:
        return None


def vision_model_of(chunk: torch.nn.Module) -> Any | None:
    """Return the ``vision_model`` of a wrapped model chunk, or None."""
    try:
        return get_attr_wrapped_model(chunk, "vision_model")
    except RuntimeError:
        return None


def unwrapped(chunk: Any) -> Iterator[Any]:
    """Yield a model chunk and each module that it wraps, the model last."""
    while chunk is not None:
        yield chunk
        chunk = getattr(chunk, "module", None)


def fsdp_of(chunk: torch.nn.Module) -> Any | None:
    """Return the ``MegatronFSDP`` among the wrappers of a model chunk, or None."""
    return next((module for module in unwrapped(chunk) if hasattr(module, "fsdp_hooks")), None)


def decoder_layers(model: Any | None) -> list[torch.nn.Module]:
    """Return ``model.decoder.layers``; an empty list if ``model`` is None or has no such layers."""
    return list(getattr(getattr(model, "decoder", None), "layers", ()))


def mtp_layers(model: Any | None) -> list[torch.nn.Module]:
    """Return the multi-token prediction layers of ``model``: one per depth, or a stack per depth in hybrid models."""
    layers: list[torch.nn.Module] = []
    for depth in getattr(getattr(model, "mtp", None), "layers", ()):
        layers += getattr(depth.mtp_model_layer, "layers", None) or [depth.mtp_model_layer]
    return layers


def language_layers(model: Any | None) -> list[torch.nn.Module]:
    """Return the decoder and multi-token prediction layers of ``model``."""
    return decoder_layers(model) + mtp_layers(model)


def set_current_microbatch(model: torch.nn.Module, microbatch_id: int) -> None:
    """Set the 0-based ``current_microbatch`` on every layer that may replay graphs. Call this before a forward pass.

    The layers are the decoder and multi-token prediction layers of the language model and the decoder layers of the
    vision model, as far as the chunk has them.
    """
    for layer in language_layers(language_model_of(model)) + decoder_layers(vision_model_of(model)):
        layer.__dict__["current_microbatch"] = microbatch_id  # Module.__setattr__ is slow


def single_run_layers(model: Any | None) -> list[torch.nn.Module]:
    """Return the layers of ``model`` that run exactly once per micro-batch, in execution order."""
    layers = decoder_layers(model)
    # A layer that replays several times per micro-batch would overwrite activations that its backward pass needs.
    if model is not None and hasattr(model, "mtp"):
        repeats = model.config.mtp_use_repeated_layer and model.config.mtp_num_layers > 1
        layers += [] if repeats else mtp_layers(model)
    return layers


def layer_name(layer: torch.nn.Module, index: int) -> str:
    """Return the name of a captured layer for errors and reports, given its ``index`` among captured layers."""
    return f"layer {getattr(layer, 'layer_number', index + 1)} ({type(layer).__name__})"


def why_not_graphable(layer: torch.nn.Module, config: Any) -> str:
    """Return why no part of ``layer`` can be captured; empty if it can."""
    from megatron.core.transformer.cuda_graphs import _layer_is_graphable  # imports this module

    if not isinstance(layer, GraphableMegatronModule):
        return "it is not a GraphableMegatronModule"
    if _layer_is_graphable(layer, config):
        return ""
    if not config.cuda_graph_modules:
        return "_layer_is_graphable excludes it"
    return f"--cuda-graph-modules {' '.join(module.name for module in config.cuda_graph_modules)} selects no part of it"


def has_forward_of(module: Any, kind: Any) -> bool:
    """Return whether ``module`` uses the original ``forward`` of megatron-core's class ``kind``."""
    if not isinstance(module, kind) or "forward" in vars(module) or type(module).forward is not kind.forward:
        return False
    return getattr(kind.forward, "__globals__", {}).get("__name__") == kind.__module__  # the class may be patched


def refuse_skipped_forward(layer: torch.nn.Module, name: str) -> None:
    """Raise UnsupportedError if ``layer`` overrides ``forward``, but its capture would not call the override."""
    from megatron.core.transformer.transformer_layer import TransformerLayer  # imports this module

    captures = getattr(type(layer), "_te_cuda_graph_capture", None) is TransformerLayer._te_cuda_graph_capture
    if captures and not has_forward_of(layer, TransformerLayer):
        raise UnsupportedError(
            f"{name} replaces forward, but a graph of a single layer would skip it: override _te_cuda_graph_capture "
            f"instead or, under Megatron-FSDP, capture the whole model ({LAYERS_FLAG} {WHOLE_MODEL})"
        )
