"""Notices that parameters are no longer what they were when graphs of their module were captured."""

from typing import NoReturn

import torch

from ..engine.addresses import AddressGuard

_ADVICE = (
    "Call delete_cuda_graphs() after moving, replacing, freezing or unfreezing parameters, or moving gradient buffers: "
    "the next step is recorded anew."
)


class ParameterGuard:
    """Compares the parameters of a module, and their main gradients, with what they were when it is made.

    Args:
        name: What errors call the module.
        module: The module. Its parameters are looked up at each check, so that replaced ones are noticed.
    """

    def __init__(self, name: str, module: torch.nn.Module):
        self._name = name
        # To walk through all submodules takes long; their dicts of parameters stay the same.
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
            grad_enabled: Whether gradients are computed, so that it matters which parameters require grad.

        Raises:
            MovedBufferError: a parameter or its ``main_grad`` is elsewhere.
            RuntimeError: another parameter is in the place of one, or one requires grad and did not, or the reverse.
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
