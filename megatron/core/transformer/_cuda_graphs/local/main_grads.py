"""Main gradients (``param.main_grad``, of ``DistributedDataParallel``) in captured backward passes."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..replacements import replaced_attribute

# The flag of a parameter whose layer has added its gradient to the main gradient.
_ADDED = "grad_added_to_main_grad"


def accumulate_into_main_grads(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], shared: Collection[torch.Tensor] = ()
) -> list[torch.Tensor | None]:
    """Add ``grads`` to the main gradients of ``params``, as the hook of ``DistributedDataParallel`` does in eager mode.

    Gradients of ``shared`` parameters are returned: autograd adds up all gradients of a backward pass before that hook
    runs, and floating-point sums depend on the order.

    Gradients are skipped if the layer has added them: with ``--gradient-accumulation-fusion`` it sets
    ``param.grad_added_to_main_grad``; for sharded weights (``--tensor-parallel-num-weight-shards``) it always does.

    Returns:
        The gradients of parameters that are shared or have no main gradient; None for the others.
    """

    def left(param: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        main_grad = getattr(param, "main_grad", None)
        if main_grad is None or grad is None:
            return grad
        if getattr(param, _ADDED, False) or getattr(param, "is_gtp_weight_remat", False):
            return None
        if any(param is each for each in shared):
            return grad
        with torch.no_grad():
            main_grad.add_(grad)
        return None

    return [left(param, grad) for param, grad in zip(params, grads, strict=True)]


def track_fused_accumulation(params: Sequence[torch.Tensor]) -> AbstractContextManager:
    """Clear the flags of ``params`` that mark fused accumulation, and restore them at the end."""
    return replaced_attribute(_with(params, _ADDED), _ADDED, lambda flag: False)


def scratch_main_grads(params: Sequence[torch.Tensor]) -> AbstractContextManager:
    """Replace the main gradients of ``params`` by scratch tensors, so that additions to them are dropped."""
    return replaced_attribute(_with(params, "main_grad"), "main_grad", torch.zeros_like)


def _with(params: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    return [param for param in params if getattr(param, name, None) is not None]
