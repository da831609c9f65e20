"""The memory that a tape reads and writes, as raw addresses.

A tape's tensors are views of bare addresses that own nothing, so a graph keeps no input alive and does not follow
``param.data = other``. Each address is checked before a replay.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import StaleAddress


@dataclass
class Block:
    """One storage as it stood when the capture first met it.

    ``before`` holds the bytes of a storage from outside the capture as they were before its first write in it.
    ``dtype`` is that of the first tensor seen on it; ``user`` names the operation that met it first.
    """

    ref: StorageWeakRef
    pointer: int
    nbytes: int
    raw: torch.Tensor
    dtype: torch.dtype
    user: str
    is_private: bool
    before: torch.Tensor | None = None

    def problem(self) -> str | None:
        """Why this memory may not be touched any more, or ``None``."""
        if self.ref.expired():
            return "was freed"
        storage = torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)
        if storage is None:
            return "was freed"
        if storage.nbytes() != self.nbytes:
            return f"was resized from {self.nbytes} to {storage.nbytes()} bytes"
        if storage.data_ptr() != self.pointer:
            return "was moved"
        return None


class AddressBook:
    """All blocks of one tape."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], Block] = {}

    def block(self, tensor: torch.Tensor, user: str, is_private: bool = False) -> Block:
        """The block ``tensor`` lies in, made on first sight."""
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        key = (storage._cdata, pointer)
        block = self.blocks.get(key)
        if block is None:
            nbytes = storage.nbytes()
            block = self.blocks[key] = Block(
                StorageWeakRef(storage), pointer, nbytes, _bytes_at(pointer, nbytes), tensor.dtype, user, is_private
            )
        return block

    def knows(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return (storage._cdata, storage.data_ptr()) in self.blocks

    def alias(self, tensor: torch.Tensor, user: str) -> torch.Tensor:
        """A tensor at the same address, of the same shape, strides and dtype, that owns nothing."""
        raw = self.block(tensor, user).raw
        alias = torch.empty(0, dtype=tensor.dtype)
        alias.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.is_conj():
            torch._C._set_conj(alias, True)
        if tensor.is_neg():
            torch._C._set_neg(alias, True)
        return alias

    def check(self) -> None:
        """Raise if any memory of the tape was freed, resized or moved since capture.

        Raises:
            StaleAddress: names the operation that used it first, and its size.
        """
        for block in self.blocks.values():
            problem = block.problem()
            if problem is not None:
                raise StaleAddress(
                    f"the graph reads or writes memory that {problem} after capture: {block.user}, "
                    f"{block.nbytes} bytes of {block.dtype}. Keep every tensor a graph uses alive and in place, and "
                    f"copy new values into it."
                )


def _bytes_at(pointer: int, nbytes: int) -> torch.Tensor:
    if nbytes == 0 or pointer == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(pointer), dtype=torch.uint8)
