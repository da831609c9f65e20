"""How a model is called in training: with what graphs of all of it, or of several layers, take, or otherwise."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..hooks import calls_weakly, runs_outside_graphs

# Arguments of GPTModel that its losses depend on and that may differ from call to call.
INPUTS = ("input_ids", "position_ids", "attention_mask", "labels")
# Its losses do not depend on these.
UNUSED = ("loss_mask",)


def is_training(model: torch.nn.Module) -> bool:
    """Whether a forward pass of ``model`` now is one that a backward pass follows."""
    return torch.is_grad_enabled() and model.training


def arguments_by_name(order: Iterable[str], args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name; ``order`` has the names of positional ones."""
    return dict(zip(order, args, strict=False)) | dict(kwargs)


NONE_SEEN = "it has not been called for training so far"
READS = "training reads hidden states between layers (extract_layer_indices)"


class TrainingCalls:
    """Watches the calls of ``model`` for training until ``against`` is asked.

    Args:
        model: A ``GPTModel``.
    """

    def __init__(self, model: torch.nn.Module):
        self._order = list(inspect.signature(model.forward).parameters)
        self._against = NONE_SEEN
        self._handle = model.register_forward_pre_hook(calls_weakly(self._watch), with_kwargs=True)
        self._unfit = ""

    def _watch(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not is_training(model):
            return
        self._against = ""
        self._unfit = _against(arguments_by_name(self._order, args, kwargs)) or self._unfit

    def against(self) -> str:
        """Say why graphs of the whole model would not serve such calls; empty if they would. Ends the watch."""
        self._handle.remove()
        return self._unfit or self._against


def _against(given: Mapping[str, Any]) -> str:
    """Say why graphs would not be replayed with the arguments ``given``, whatever the length of sequences."""
    labels = given.get("labels")
    if labels is None:
        return "it was called without labels"
    others = [name for name in given if given[name] is not None and name not in (*INPUTS, *UNUSED)]
    if others:
        return f"it was called with {', '.join(others)}"
    rows, length = labels.shape
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]]
    expected = dict.fromkeys(("input_ids", "position_ids", "labels"), ((rows, length), torch.int64))
    if given.get("attention_mask") is not None:
        expected["attention_mask"] = ((rows, 1, length, length), torch.bool)
    for name, (shape, dtype) in expected.items():
        tensor = given.get(name)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape or tensor.dtype != dtype:
            return f"its {name} are not of shape {list(shape)} and {dtype}"
    return ""


class HiddenStatesReads:
    """Watches whether decoders are asked for hidden states between their layers in training, until ``any`` is asked.

    Args:
        decoders: A ``TransformerBlock``, or what stands in its place, of each chunk of the model.
    """

    def __init__(self, decoders: Iterable[torch.nn.Module]):
        # After the call: other hooks may have changed its arguments. It is no reason against a graph.
        hook = runs_outside_graphs(calls_weakly(self._watch))
        self._any = False
        self._handles = [decoder.register_forward_hook(hook, with_kwargs=True) for decoder in decoders]

    def _watch(self, decoder: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> None:
        if kwargs.get("extract_layer_indices") and is_training(decoder):
            self._any = True

    def any(self) -> bool:
        """Whether one was. Ends the watch."""
        for handle in self._handles:
            handle.remove()
        return self._any
