"""Weight gradients that modules leave to a pass of their own, as TransformerEngine's do (``delay_wgrad_compute``)."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch


def delays_weight_gradients(module: torch.nn.Module) -> bool:
    """Whether ``module`` is one that may, and does, delay its weight gradients."""
    return hasattr(module, "need_backward_dw") and module.need_backward_dw()


class DelayedWeightGradients:
    """The modules of one callable that delay their weight gradients, and the gradients that a graph computes for them.

    Args:
        modules: Modules with ``need_backward_dw``, ``backward_dw`` and ``wgrad_store``, which run in the forward pass.
        params: The callable's parameters.
    """

    def __init__(self, modules: Iterable[Any], params: Iterable[torch.Tensor]):
        self._modules = tuple(modules)
        self._params = tuple(params)
        self._grads: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._modules)

    def compute(self, recording: Callable[[], AbstractContextManager]) -> None:
        """Compute what the last backward pass left, within ``recording()``. No parameter's ``grad`` changes."""
        before = [param.grad for param in self._params]
        with recording():
            for module in self._modules:
                module.backward_dw()
        changed = [(param, grad) for param, grad in zip(self._params, before, strict=True) if param.grad is not grad]
        self._grads = [(param, param.grad) for param, _ in changed if param.grad is not None]
        for param, grad in changed:
            param.grad = grad

    def hand_out(self, clone: bool) -> None:
        """Set ``grad`` of parameters to what a replay computed, and run the hooks that modules run after that.

        Parameters of modules that accumulate into ``main_grad`` get none.
        """
        for param, grad in self._grads:
            param.grad = grad.clone() if clone else grad
        for module in self._modules:
            module._trigger_wgrad_accumulation_and_reduce_hooks()

    def forget(self) -> None:
        """Drop what a failed pass left to be computed, which the next one would take for its own."""
        for module in self._modules:
            while module.wgrad_store.context.qsize():  # TransformerEngine's queue
                module.wgrad_store.context.get()
