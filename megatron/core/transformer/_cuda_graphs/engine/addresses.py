"""Refuses replays after a tensor that CUDA graphs use has moved since capture."""

from collections.abc import Callable, Sequence

import torch

from ..errors import ChangedSinceCaptureError
from ..snapshot import address_of

MovedBufferError = ChangedSinceCaptureError


class AddressGuard:
    """Records the addresses of tensors when constructed, at capture, and refuses replays once one has moved.

    A replay after that would read or write memory that now belongs to something else.

    Args:
        tensors: Returns the current tensors, always in the same order; None for one that does not exist (a parameter
            without ``main_grad``, say).
        describe: Returns the name of the tensor of this index for errors.
        advice: The end of the error message: what to do about it.
    """

    def __init__(
        self, tensors: Callable[[], Sequence[torch.Tensor | None]], describe: Callable[[int], str], advice: str
    ):
        self._tensors, self._describe, self._advice = tensors, describe, advice
        self._captured = [address_of(tensor) for tensor in tensors()]

    def check(self) -> None:
        """Raise a ``MovedBufferError`` if a tensor is not where it was, or there are more or fewer of them."""
        tensors = self._tensors()
        try:  # runs for every layer of every step: no function call per tensor where all of them exist
            current = [tensor.data_ptr() for tensor in tensors]  # type: ignore[union-attr]
        except (AttributeError, RuntimeError):
            current = [address_of(tensor) for tensor in tensors]
        if current == self._captured:
            return
        if len(current) != len(self._captured):
            raise MovedBufferError(
                f"CUDA graphs used {len(self._captured)} tensors at capture and {len(current)} now. {self._advice}"
            )
        index = next(i for i, address in enumerate(current) if address != self._captured[i])
        name, before, now = self._describe(index), self._captured[index], current[index]
        if not before:
            raise MovedBufferError(
                f"CUDA graphs were captured without {name}, which is now at {now:#x}. {self._advice}"
            )
        moved = f"now it is at {now:#x}" if now else "it does not exist any more"
        raise MovedBufferError(
            f"CUDA graphs use {name} at {before:#x}, where it was at capture; {moved}. {self._advice}"
        )
