"""Observe training calls before a capture, and define the arguments that graphs of models accept."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..flags.options import packed_sequences
from ..hooks import calls_weakly, runs_outside_graphs
from ..inputs import OFFSETS, unpack

# The input that ``set_input_tensor`` passes to a model chunk that follows a different pipeline stage.
HIDDEN_STATES = "hidden_states"
OPTIONAL = frozenset(("attention_mask", "labels"))  # arguments of ``expected_inputs`` that calls may omit
_UNCALLED = "the model has not been called for training yet"


def expected_inputs(model: Any, tokens: int, sequences: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each argument that affects the output of ``model``, keyed by name.

    Packed sequences are represented by their offsets. ``tokens`` is the sequence length on this rank.
    """
    config = getattr(model, "config", None)
    ids = (sequences, tokens), torch.int64
    whole = tokens * getattr(config, "context_parallel_size", 1)
    mask = (sequences, 1, tokens, whole), torch.bool
    expected = {"input_ids": ids, "position_ids": ids, "attention_mask": mask, "labels": ids}
    if getattr(model, "position_embedding_type", None) == "mrope":
        expected["position_ids"] = (3, sequences, whole), torch.int64  # the model shards them across ranks
    if predicts_tokens(model):
        expected["loss_mask"] = (sequences, tokens), torch.float32
    if (packed := packed_sequences(config)) is not None:
        del expected["attention_mask"]
        expected |= dict.fromkeys(OFFSETS, ((packed + 1,), torch.int32))
    if not is_first(model) and not predicts_tokens(model):
        del expected["input_ids"]
        if expected["position_ids"] == ids:
            del expected["position_ids"]
    if not is_last(model):
        del expected["labels"]
    return expected


def is_first(model: Any) -> bool:
    """Return whether ``model`` reads tokens instead of hidden states from a previous pipeline stage."""
    return bool(getattr(model, "pre_process", True))


def is_last(model: Any) -> bool:
    """Return whether ``model`` returns losses or logits instead of hidden states for the next pipeline stage."""
    return bool(getattr(model, "post_process", True))


def predicts_tokens(model: Any) -> bool:
    """Return whether ``model`` has multi-token prediction layers, which also embed tokens."""
    return hasattr(model, "mtp")


def unused_by(model: Any) -> set[str]:
    """Return the names of arguments that ``model`` ignores because only other pipeline chunks read them."""
    return {"input_ids", "position_ids", "labels", "loss_mask"}.difference(expected_inputs(model, 1, 1))


def shape_of(model: Any, given: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the sequence length on this rank and the micro-batch size of a call of ``model``; None if unknown."""
    if not is_first(model):
        tokens, sequences, _ = given.get(HIDDEN_STATES, model.decoder.input_tensor).shape
        return tokens * (model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1), sequences
    shown = given.get("input_ids")
    return None if getattr(shown, "ndim", None) != 2 else tuple(shown.shape[::-1])  # type: ignore[union-attr]


def is_training(model: torch.nn.Module) -> bool:
    """Return whether grad is enabled and ``model`` is in training mode, so that a backward pass is expected."""
    return torch.is_grad_enabled() and model.training


def arguments_by_name(order: Iterable[str], args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, keyed by name, given the ordered names of positional arguments."""
    return dict(zip(order, args, strict=False)) | dict(kwargs)


class TrainingCalls:
    """Observes training calls of a model until ``stop``, to predict whether graphs will match later calls.

    Args:
        models: The model, or its chunks in a pipeline stage.

    Attributes:
        interleaved: Whether a second forward pass has run before the backward pass of the first, as in pipelines. A
            single graph would then overwrite the activations of the first pass.
        given: The optional arguments that any call had; all of them before the first call.
    """

    def __init__(self, models: Iterable[torch.nn.Module]):
        self.interleaved = False
        self._blockers = dict.fromkeys(models, _UNCALLED)
        self._passes = 0
        self.given = set(OPTIONAL)
        self._orders = {model: list(inspect.signature(model.forward).parameters) for model in self._blockers}
        # A forward hook, because forward-pre hooks may change the arguments. This hook does not prevent a capture.
        observe = runs_outside_graphs(calls_weakly(self._observe))
        self._handles = [model.register_forward_hook(observe, with_kwargs=True) for model in self._blockers]

    @property
    def blocker(self) -> str:
        """Why graphs of the whole model do not match the calls so far; empty if they do."""
        return next(filter(None, self._blockers.values()), "")

    def stop(self) -> None:
        """Stop observing calls."""
        while self._handles:
            self._handles.pop().remove()

    def _observe(self, model: torch.nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> None:
        if not is_training(model):
            return
        given = arguments_by_name(self._orders[model], args, kwargs)
        if not self._passes:
            self.given.clear()
        self.given.update(name for name in OPTIONAL if given.get(name) is not None)
        if self._blockers[model] in ("", _UNCALLED):  # one mismatch is enough
            self._blockers[model] = call_blocker(model, given)
        self._passes += 1
        own = self._passes

        def backward_begins(grad: torch.Tensor) -> None:
            self.interleaved |= own != self._passes

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(backward_begins)


def call_blocker(model: Any, given: dict[str, Any]) -> str:
    """Return why no graph of ``model`` can match a call with the arguments ``given``; empty if one can."""
    shape_on_rank = shape_of(model, given)
    if shape_on_rank is None:
        return "the model was called without tokens"
    expected = expected_inputs(model, *shape_on_rank)
    if OFFSETS[0] in expected and unpack(given, shape_on_rank[0] * model.config.context_parallel_size):
        return "the model's packed_seq_params are not padded by pad_packed_seq_params"
    others = [name for name in given if given[name] is not None and name not in (*expected, *unused_by(model))]
    if others:
        return f"the model was called with {', '.join(others)}"
    for name in OPTIONAL:
        if given.get(name) is None:
            expected.pop(name, None)
    for name, (shape, dtype) in expected.items():
        tensor = given.get(name)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape or tensor.dtype != dtype:
            found = f"{list(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else tensor
            return f"the model's {name} must have shape {list(shape)} and dtype {dtype}, got {found}"
    return ""
