"""Detects that a module's parameters changed since its graphs were captured."""

from typing import NoReturn

import torch

from ..engine.addresses import AddressGuard

_ADVICE = (
    "Call delete_cuda_graphs() after moving, replacing, freezing or unfreezing parameters, or moving gradient buffers: "
    "the next step is recorded anew."
)


class ParameterGuard:
    """Compares the parameters of a module, and their main gradients, with those at construction.

    Args:
        name: The module's name in errors.
        module: The module. Its parameters are looked up at each check, so that replaced ones are detected.
    """

    def __init__(self, name: str, module: torch.nn.Module):
        self._name = name
        # Walking all submodules is slow; their parameter dicts stay the same objects.
        self._places = [
            (f"{prefix}.{key}" if prefix else key, owner._parameters, key)
            for prefix, owner in module.named_modules()
            for key in owner._parameters
        ]
        self._params = self._current()
        self._requires_grad = [param is not None and param.requires_grad for param in self._params]
        self._addresses = AddressGuard(self._tensors, self._describe, f"(--cuda-graph-impl local) {_ADVICE}")

    def check(self, grad_enabled: bool) -> None:
        """Compare.

        Args:
            grad_enabled: Whether gradients are computed; ``requires_grad`` is compared only then.

        Raises:
            MovedBufferError: a parameter or its ``main_grad`` has another address.
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
        return [params.get(key) for _, params, key in self._places]

    def _tensors(self) -> list[torch.Tensor | None]:
        current = self._current()
        return [*current, *(None if param is None else getattr(param, "main_grad", None) for param in current)]

    def _describe(self, index: int) -> str:
        name = self._places[index % len(self._places)][0]
        kind = "parameter" if index < len(self._places) else "main_grad of parameter"
        return f"{kind} {name} of {self._name}"
