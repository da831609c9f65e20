"""Checks the inputs of a replay, and restores those that a call leaves out to their values at capture."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .errors import ArgumentTypeError


class ExpectedInputs:
    """The inputs that a callable was captured with, and what errors call them.

    Args:
        name_of: Returns what errors call the input of this index.
        advice: The end of an error about another shape or dtype.
    """

    def __init__(self, owner: str, tensors: Sequence[torch.Tensor], name_of: Callable[[int], str], advice: str = ""):
        self._owner, self._name_of, self._advice = owner, name_of, advice
        self._expected = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]

    def __len__(self) -> int:
        return len(self._expected)

    def rename(self, owner: str, name_of: Callable[[int], str], advice: str) -> None:
        """Set how errors call the callable and its inputs, and their advice."""
        self._owner, self._name_of, self._advice = owner, name_of, advice

    def accepts(self, inputs: Sequence[Any]) -> bool:
        """Whether there are as many ``inputs`` as at capture and ``check`` would find nothing wrong with them."""
        if len(inputs) != len(self._expected):
            return False
        for given, (shape, dtype, requires_grad) in zip(inputs, self._expected):  # noqa: B905
            if not isinstance(given, torch.Tensor) or given.shape != shape or given.dtype != dtype:
                return False
            if given.requires_grad and not requires_grad and torch.is_grad_enabled():
                return False
        return True

    def check(self, inputs: Sequence[Any]) -> None:
        """Compare ``inputs`` with those at capture; there must be as many.

        Raises:
            ArgumentTypeError: an input is not a tensor.
            ValueError: an input has another shape or dtype, or requires grad and did not at capture.
        """
        if self.accepts(inputs):
            return
        for index, (given, (shape, dtype, requires_grad)) in enumerate(zip(inputs, self._expected, strict=True)):
            if not isinstance(given, torch.Tensor):
                raise ArgumentTypeError(
                    f"{self._owner}: {self._name_of(index)} must be a tensor for a CUDA graph, got {given!r}"
                )
            if given.shape != shape or given.dtype != dtype:
                raise ValueError(
                    f"{self._owner} was captured with {self._name_of(index)} of {tuple(shape)} {dtype} and is called "
                    f"with {tuple(given.shape)} {given.dtype}{self._advice}"
                )
            if given.requires_grad and not requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{self._owner} was captured with {self._name_of(index)} that requires no grad, and it requires "
                    "grad now, which its CUDA graph does not compute: capture with an input that requires grad, or "
                    "detach it"
                )


class DefaultInputs:
    """Restores static inputs to their values at capture, for calls that leave them out.

    Share one object among graphs whose static inputs of a name were equal at capture. Values are kept on the host.
    """

    def __init__(self) -> None:
        self._captured: dict[str, torch.Tensor] = {}
        self._overwritten: set[int] = set()  # the ids of static inputs

    def will_overwrite(self, name: str, static: torch.Tensor) -> None:
        """Keep the value at capture of ``static``, which the next replay overwrites."""
        if id(static) not in self._overwritten:
            self._overwritten.add(id(static))
            if name not in self._captured:
                self._captured[name] = static.detach().to("cpu", copy=True)

    def restore(self, name: str, static: torch.Tensor) -> None:
        """Restore ``static`` if a replay has overwritten it."""
        if id(static) in self._overwritten:
            self._overwritten.remove(id(static))
            static.detach().copy_(self._captured[name])
