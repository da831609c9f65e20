"""Refuses replays after a tensor that CUDA graphs use has moved since capture."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from ..errors import ChangedSinceCaptureError

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


class Place(NamedTuple):
    """Where a module keeps a parameter or buffer.

    Attributes:
        name: Its name, with those of the modules around it.
        owner: The dict of parameters or buffers that has it; it stays the same object, whatever is put into it.
        key: Its key there.
    """

    name: str
    owner: dict[str, torch.Tensor | None]
    key: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """What is there now."""
        return self.owner.get(self.key)


def places_of(module: torch.nn.Module, kind: Literal["_parameters", "_buffers"]) -> list[Place]:
    """Return the places of all parameters or buffers of ``module``: walking all submodules is slow."""
    return [
        Place(f"{prefix}.{key}" if prefix else key, getattr(owner, kind), key)
        for prefix, owner in module.named_modules()
        for key in getattr(owner, kind)
    ]


def guard_module(
    name: str,
    module: torch.nn.Module,
    advice: str,
    *,
    params: Sequence[Place],
    main_grads: bool,
    inputs: Sequence[tuple[str, torch.Tensor]] = (),
) -> AddressGuard | None:
    """Return a guard of the tensors that the graphs of ``module`` use at fixed addresses; None if there are none.

    Args:
        params: The places of its parameters that are guarded.
        main_grads: Whether graphs add to their ``main_grad``.
        inputs: Its static inputs, each after its name.
    """
    written = params if main_grads else []
    # Some modules make a buffer only when they first need it.
    buffers = [place for place in places_of(module, "_buffers") if place.tensor is not None]
    kinds = [("", params), ("the main gradient of ", written), ("the buffer ", buffers)]
    names = [f"{kind}{place.name} of {name}" for kind, places in kinds for place in places]
    names += [f"the static input {each} of {name}" for each, _ in inputs]
    static = [tensor for _, tensor in inputs]
    if not names:
        return None

    def tensors() -> list[torch.Tensor | None]:
        return [
            *[owner.get(key) for _, owner, key in params],
            *[getattr(owner.get(key), "main_grad", None) for _, owner, key in written],
            *[owner.get(key) for _, owner, key in buffers],
            *static,
        ]

    return AddressGuard(tensors, names.__getitem__, advice)


def address_of(tensor: torch.Tensor | None) -> int:
    """The address of ``tensor``; 0 for None and for tensors without memory of their own (quantized parameters)."""
    if tensor is None:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0
