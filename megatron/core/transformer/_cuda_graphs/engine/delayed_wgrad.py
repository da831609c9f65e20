"""Weight gradients that modules compute in a pass of their own, as TransformerEngine's ``delay_wgrad_compute`` does."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .preserve import hide_grads_and_hooks


def delays_weight_gradients(module: torch.nn.Module) -> bool:
    """Whether ``module`` delays its weight gradients."""
    return hasattr(module, "need_backward_dw") and module.need_backward_dw()


class DelayedWeightGradients:
    """The modules of one callable that delay their weight gradients, and the gradients that a graph computes for them.

    Args:
        modules: Modules with ``need_backward_dw`` and ``backward_dw``, which run in the forward pass.
    """

    def __init__(self, modules: Iterable[Any], params: Iterable[torch.Tensor]):
        self._modules = tuple(modules)
        self._compute = [module.backward_dw for module in self._modules]  # a graphed module replaces this method
        self._notify = [
            module._trigger_wgrad_accumulation_and_reduce_hooks
            for module in self._modules
            if hasattr(module, "_trigger_wgrad_accumulation_and_reduce_hooks")
        ]
        self._params = tuple(params)
        self._grads: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._modules)

    def compute(self, recording: Callable[[], AbstractContextManager]) -> None:
        """Compute the gradients that the last backward pass delayed, within ``recording()``.

        The ``grad`` of parameters is restored afterwards.
        """
        # Hidden, because modules do not set a grad that exists already.
        with hide_grads_and_hooks(self._params):
            with recording():
                self.compute_eagerly()
            self._grads = [(param, param.grad) for param in self._params if param.grad is not None]

    def compute_eagerly(self) -> None:
        """Compute the gradients that the last backward pass of the modules delayed."""
        for compute in self._compute:
            compute()

    def hand_out(self, clone: bool) -> None:
        """Set ``grad`` of parameters to the gradients of a replay, and run the modules' hooks for that.

        Parameters of modules that accumulate into ``main_grad`` get no ``grad``.
        """
        for param, grad in self._grads:
            param.grad = grad.clone() if clone else grad
        for notify in self._notify:
            notify()

    def forget(self) -> None:
        """Drop the delayed work of a failed pass, which the next pass would otherwise run."""
        for module in self._modules:
            queue = getattr(getattr(module, "wgrad_store", None), "context", None)  # TransformerEngine's
            while queue is not None and queue.qsize():
                queue.get()
