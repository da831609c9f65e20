"""Detects that a module's parameters or buffers changed since its graphs were captured.

Static inputs belong to the graphs' pool and cannot move.
"""

from typing import NoReturn

import torch

from ..engine.addresses import AddressGuard, places_of

_ADVICE = (
    "Call delete_cuda_graphs() after moving, replacing, freezing or unfreezing parameters, or moving buffers or "
    "gradient buffers: the next step is recorded anew."
)


class ParameterGuard:
    """Compares the parameters of a module, their main gradients, and buffers with those at construction.

    Args:
        name: The module's name in errors.
        module: The module. Its parameters are looked up at each check, so that replaced ones are detected.
    """

    def __init__(self, name: str, module: torch.nn.Module):
        self._name = name
        self._places = places_of(module, "_parameters")
        # Some modules make a buffer only when they first need it.
        self._buffers = [place for place in places_of(module, "_buffers") if place.tensor is not None]
        self._params = self._current()
        self._requires_grad = [param is not None and param.requires_grad for param in self._params]
        self._addresses = AddressGuard(self._tensors, self._describe, f"(--cuda-graph-impl local) {_ADVICE}")

    def check(self, grad_enabled: bool) -> None:
        """Compare.

        Args:
            grad_enabled: Whether gradients are computed; ``requires_grad`` is compared only then.

        Raises:
            MovedBufferError: a parameter, its ``main_grad`` or a buffer has another address.
            RuntimeError: a parameter was replaced, frozen or unfrozen.
        """
        self._addresses.check()
        current = self._current()
        for param, captured, required_grad, (name, _, _) in zip(
            current, self._params, self._requires_grad, self._places, strict=True
        ):
            if param is not captured:
                self._refuse(name, "was replaced")
            elif grad_enabled and param is not None and param.requires_grad != required_grad:
                self._refuse(name, "was frozen" if required_grad else "was unfrozen")

    def _refuse(self, name: str, change: str) -> NoReturn:
        raise RuntimeError(
            f"{self._name}: parameter {name} {change} since its CUDA graphs were captured (--cuda-graph-impl local). "
            f"{_ADVICE}"
        )

    def _current(self) -> list[torch.Tensor | None]:
        return [owner.get(key) for _, owner, key in self._places]

    def _tensors(self) -> list[torch.Tensor | None]:
        current = self._current()
        main_grads = [None if param is None else getattr(param, "main_grad", None) for param in current]
        return [*current, *main_grads, *(owner.get(key) for _, owner, key in self._buffers)]

    def _describe(self, index: int) -> str:
        kinds = [("parameter", self._places), ("main_grad of parameter", self._places), ("buffer", self._buffers)]
        names = [f"{kind} {place.name}" for kind, places in kinds for place in places]
        return f"{names[index]} of {self._name}"
