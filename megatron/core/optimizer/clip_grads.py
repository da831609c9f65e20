"""Gradient clipping that takes the local shards of gradients at less cost to the host.

Everything else in this module is megatron-core's.
"""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_fsdp_cuda_graphs.overlay import extend

from .clipped_gradients import ClippedGradients
from .kept_gradients import gradients_of, stay

_upstream: Any = extend(__name__)
# By the first of the parameters, whose gradients are kept no longer than that one lives.
_clipped: MutableMapping[Any, ClippedGradients] = WeakIdKeyDictionary()

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def to_local_if_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a ``DTensor``, without a record for autograd; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def clip_grad_by_total_norm_fp32(
    parameters: list[Any], max_norm: float, total_norm: float | torch.Tensor, use_decoupled_grad: bool = False
) -> None:
    """Scale the gradients of ``parameters``, in place, so that their norm is at most ``max_norm``; see megatron-core.

    Args:
        parameters: Parameters, also such as have no gradient.
        max_norm: The largest norm.
        total_norm: The norm.
        use_decoupled_grad: Whether gradients are in ``decoupled_grad``, not in ``grad``.
    """
    kept = _kept_gradients(parameters, "decoupled_grad" if use_decoupled_grad else "grad")
    taken = parameters if kept is None else kept.params
    _upstream.clip_grad_by_total_norm_fp32(taken, max_norm, total_norm, use_decoupled_grad)


def _kept_gradients(parameters: Any, name: str) -> ClippedGradients | None:
    """Return the gradients of ``parameters`` if they stay from step to step; ``name`` is the attribute they are in."""
    if not isinstance(parameters, list) or not parameters:
        return None
    grads = gradients_of(parameters, name)
    kept = _clipped.get(parameters[0])
    if kept is not None and kept.are(grads):
        return kept
    _clipped.pop(parameters[0], None)
    if not stay(grads):
        return None
    kept = _clipped[parameters[0]] = ClippedGradients(grads, name)
    return kept
