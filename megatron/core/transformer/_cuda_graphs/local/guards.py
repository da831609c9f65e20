"""Whether graphs still compute what their module would: what they use, and what its passes read, is compared."""

from collections.abc import Sequence
from typing import Any

import torch

from ..attribute_reads import AttributeReads
from ..engine.addresses import guard_module, places_of
from ..replay_conditions import ReplayConditions

_ADVICE = (
    "Call delete_cuda_graphs() after moving, replacing, freezing or unfreezing parameters, or moving buffers or "
    "gradient buffers: the next step is recorded anew."
)


class FunctionGuard:
    """Compares the parameters of a module, their main gradients, buffers, and attributes with those at construction.

    Static inputs are not compared: they belong to the graphs' pool and cannot move.

    Args:
        module: Its module. Parameters are looked up at each check, so that replaced ones are detected.
        autocast: What ``autocast_in_force`` returned for the recorded pass.
    """

    def __init__(self, name: str, module: torch.nn.Module, reads: AttributeReads, autocast: Sequence[Any]):
        self._name = name
        self._places = places = places_of(module, "_parameters")
        self._params = [place.tensor for place in places]
        self._requires_grad = [param is not None and param.requires_grad for param in self._params]
        advice = f"(--cuda-graph-impl local) {_ADVICE}"
        self._addresses = guard_module(name, module, advice, params=places, main_grads=True)
        self._conditions = ReplayConditions(module, reads, name, hooks_run=False, parameters=False, autocast=autocast)

    def check(self) -> None:
        """Compare parameters, buffers and what passes read. It runs before each replay.

        Raises:
            RuntimeError: something has changed since capture; names it.
        """
        self.check_parameters(torch.is_grad_enabled())
        if self._conditions.have_changed():
            raise RuntimeError(
                f"{self._conditions.changes()} (--cuda-graph-impl local). Change it back, or call "
                "delete_cuda_graphs(): the next step is recorded anew."
            )

    def check_parameters(self, grad_enabled: bool) -> None:
        """Compare parameters and buffers.

        Args:
            grad_enabled: Whether gradients are computed; ``requires_grad`` and hooks are looked at only then.

        Raises:
            MovedBufferError: a parameter, its ``main_grad`` or a buffer has another address.
            RuntimeError: a parameter was replaced, frozen or unfrozen, or has a hook beside a main gradient.
        """
        if self._addresses is not None:
            self._addresses.check()
        for place, captured, required_grad in zip(self._places, self._params, self._requires_grad, strict=True):
            param = place.owner.get(place.key)
            change = ""
            if param is not captured:
                change = "replaced"
            elif grad_enabled and param is not None and param.requires_grad != required_grad:
                change = "frozen" if required_grad else "unfrozen"
            if change:
                raise RuntimeError(
                    f"{self._name}: parameter {place.name} was {change} since its CUDA graphs were captured "
                    f"(--cuda-graph-impl local). {_ADVICE}"
                )
            has_hooks = param is not None and param._backward_hooks
            if grad_enabled and has_hooks and getattr(param, "main_grad", None) is not None:
                raise RuntimeError(
                    f"{self._name}: parameter {place.name} has a hook (register_hook), which CUDA graphs would give no "
                    "gradient (--cuda-graph-impl local): remove it, or use --cuda-graph-impl none"
                )
