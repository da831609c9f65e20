"""The memory that a tape reads and writes, as raw addresses.

A tape's tensors are views of bare addresses that own nothing, so a graph keeps no input alive and does not follow
``param.data = other``. Each address is checked before a replay.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fsdp_cuda_graphs.tensor_alias import alias_of

from .errors import StaleAddress
from .pools import Pool


@dataclass(slots=True)
class Block:
    """One storage as it stood when the capture first met it.

    Attributes:
        ref: the storage, not kept alive.
        raw: its bytes, a uint8 tensor that owns nothing.
        user: the operator that met it first, with the shape and dtype of the tensor.
        is_private: it was allocated in the capture.
        before: the bytes that memory from outside the capture held before its first write in it.
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
        if self.nbytes == 0:
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)
        if storage is None:
            return "was freed"
        if storage.nbytes() < self.nbytes:
            return f"was resized from {self.nbytes} to {storage.nbytes()} bytes"
        if storage.data_ptr() != self.pointer:
            return "was moved"
        return None


class AddressBook:
    """All blocks of one tape, whose own memory is of ``pool``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._blocks: dict[tuple[int, int], Block] = {}
        self._outside: list[Block] = []
        # one tensor on each private storage, and the addresses they had: torch compares all in one call
        self._private: list[torch.Tensor] = []
        self._private_pointers: list[int] = []
        self._private_storages: set[int] = set()

    def __iter__(self):
        return iter(self._blocks.values())

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in a block of this book."""
        storage = tensor.untyped_storage()
        return (storage._cdata, storage.data_ptr()) in self._blocks

    def block(self, tensor: torch.Tensor, op: str, is_private: bool = False) -> Block:
        """The block ``tensor`` lies in, made on first sight; ``is_private`` if the capture allocated it."""
        storage = tensor.untyped_storage()
        pointer, nbytes = storage.data_ptr(), storage.nbytes()
        key = (storage._cdata, pointer)
        if key not in self._blocks:
            # a storage of the capture that was resized in it (out=torch.empty(0)) is still the capture's
            is_private = is_private or storage._cdata in self._private_storages
            user = f"{op} on a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}"
            raw = _bytes_at(pointer, nbytes)
            block = Block(StorageWeakRef(storage), pointer, nbytes, raw, tensor.dtype, user, is_private)
            self._blocks[key] = block
            if is_private:
                self._private.append(self._pool.own(storage, tensor.dtype))
                self._private_pointers.append(pointer)
                self._private_storages.add(storage._cdata)
            else:
                self._outside.append(block)
        return self._blocks[key]

    def alias(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """A tensor at the same address, of the same shape, strides and dtype, that owns nothing."""
        return alias_of(tensor, self.block(tensor, op).raw.untyped_storage())

    def check(self) -> None:
        """Raise if any memory of the tape was freed, resized or moved since capture.

        Raises:
            StaleAddress: names the operator that used it first, and the tensor's shape and dtype.
        """
        alive = torch.UntypedStorage._new_with_weak_ptr
        for block in self._outside:
            storage = alive(block.ref.cdata)
            if storage is None or storage.data_ptr() != block.pointer:
                _raise_stale(block)
        same = torch._C._tensors_data_ptrs_at_indices_equal
        if not same(self._private, self._private_pointers, list(range(len(self._private)))):
            for block in self:
                _raise_stale(block)


def _raise_stale(block: Block) -> None:
    problem = block.problem()
    if problem is not None:
        raise StaleAddress(
            f"the graph uses memory that {problem} after capture: {block.user}. Keep every tensor that a graph uses "
            f"alive and in place, and copy new values into it."
        )


def _bytes_at(pointer: int, nbytes: int) -> torch.Tensor:
    if nbytes == 0 or pointer == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(pointer), dtype=torch.uint8)
