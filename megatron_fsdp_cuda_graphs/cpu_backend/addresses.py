"""The memory that a tape reads and writes, as raw addresses.

A tape's tensors are views of raw memory and own nothing, so a graph keeps no input alive and does not follow
``param.data = other``. All addresses are checked before a replay.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from . import capture_state
from .errors import StaleAddress
from .patches import wrap
from .pools import Pool

# the identity of a storage, and the address of its memory
_Place = tuple[int, int]


def alias_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor over ``storage`` that lies in it as ``tensor`` lies in its own storage.

    It has the dtype, shape, strides, storage offset and the conjugate and negative bits of ``tensor``, the device of
    ``storage``, and takes no part in autograd.
    """
    alias = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    alias.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        torch._C._set_conj(alias, True)
    if tensor.is_neg():
        torch._C._set_neg(alias, True)
    return alias


def problem_of(storage: StorageWeakRef, address: int, nbytes: int) -> str | None:
    """Say what has happened to the memory of a storage since it was ``nbytes`` at ``address``; None if nothing."""
    now = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    if now is None:
        return "was freed"
    if now.nbytes() < nbytes:
        return f"was resized from {nbytes} to {now.nbytes()} bytes"
    return "was moved" if now.data_ptr() != address else None


@dataclass(slots=True)
class Block:
    """One storage as it stood when the capture first met it.

    Attributes:
        ref: the storage, not kept alive.
        raw: its bytes, a uint8 tensor that owns nothing.
        user: the operator that met it first, with the shape and dtype of the tensor.
        is_private: it was allocated in the capture.
        before: the bytes that memory from outside the capture held before its first write in it.
        aliases: the tape's tensors in this memory.
    """

    ref: StorageWeakRef
    pointer: int
    nbytes: int
    raw: torch.Tensor
    dtype: torch.dtype
    user: str
    is_private: bool
    before: torch.Tensor | None = None
    aliases: list[torch.Tensor] = field(default_factory=list)

    def problem(self) -> str | None:
        """Why this memory may not be touched any more, or ``None``."""
        return problem_of(self.ref, self.pointer, self.nbytes) if self.nbytes else None


class AddressBook:
    """All blocks of one tape, whose own memory is of ``pool``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._blocks: dict[_Place, Block] = {}
        # a tensor of the bytes of each private storage, by where these were when the capture met them
        self._private: dict[_Place, torch.Tensor] = {}
        self._private_storages: set[int] = set()
        self._private_addresses: set[int] = set()

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def block(self, tensor: torch.Tensor, op: str, is_private: bool = False) -> Block:
        """The block ``tensor`` lies in, made on first sight; ``is_private`` if the capture allocated it."""
        storage = tensor.untyped_storage()
        place = _place(storage)
        if place not in self._blocks:
            is_private = is_private or self._is_of_the_capture(place)
            user = f"{op} on a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}"
            pointer, nbytes = storage.data_ptr(), storage.nbytes()
            raw = _bytes_at(pointer, nbytes)
            self._blocks[place] = Block(StorageWeakRef(storage), pointer, nbytes, raw, tensor.dtype, user, is_private)
            if is_private:
                self._own(storage, tensor.dtype)
        return self._blocks[place]

    def _is_of_the_capture(self, place: _Place) -> bool:
        """Whether a new block is a storage of the capture that was resized in it, or one that shares its memory."""
        storage, pointer = place
        return storage in self._private_storages or (pointer != 0 and pointer in self._private_addresses)

    def _own(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self._private[_place(storage)] = self._pool.own(storage, dtype)
        self._private_storages.add(storage._cdata)
        self._private_addresses.add(storage.data_ptr())

    def alias(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """A tensor at the same address, of the same shape, strides and dtype, that does not own its memory."""
        block = self.block(tensor, op)
        block.aliases.append(alias_of(tensor, block.raw.untyped_storage()))
        return block.aliases[-1]

    def keep_memory_of(self, storage: torch.UntypedStorage) -> None:
        """Move the tape's tensors off the memory of ``storage``, which the capture is about to resize.

        On a GPU that memory stays in the graph's pool. Here the tape continues on a copy. Nothing happens to a storage
        that the capture did not allocate.
        """
        place = _place(storage)
        if self._private.pop(place, None) is None:
            return
        block = self._blocks.pop(place)
        self._private_addresses.discard(block.pointer)
        self._pool.release(storage)
        block.raw = block.raw.clone()
        kept = block.raw.untyped_storage()
        for alias in block.aliases:
            alias.set_(kept, alias.storage_offset(), alias.size(), alias.stride())
        block.ref, block.pointer = StorageWeakRef(kept), kept.data_ptr()
        self._blocks[_place(kept)] = block
        self._own(kept, block.dtype)

    @functools.cached_property
    def _outside(self) -> list[Block]:
        return [block for block in self if not block.is_private]

    @functools.cached_property
    def _private_tensors(self) -> tuple[list[torch.Tensor], list[int], list[int]]:
        """The tensors of private memory, their addresses and indices: torch compares all in one call."""
        return list(self._private.values()), [pointer for _, pointer in self._private], list(range(len(self._private)))

    def check(self) -> None:
        """Raise if any memory of the tape was freed, resized or moved since capture. The capture must have ended.

        Raises:
            StaleAddress: names the operator that used it first, and the tensor's shape and dtype.
        """
        alive = torch.UntypedStorage._new_with_weak_ptr
        for block in self._outside:
            storage = alive(block.ref.cdata)
            if storage is None or storage.data_ptr() != block.pointer:
                _raise_stale(block)
        if not torch._C._tensors_data_ptrs_at_indices_equal(*self._private_tensors):
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


def _place(storage: torch.UntypedStorage) -> _Place:
    return storage._cdata, storage.data_ptr()


def _resize(call: Callable, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    state = capture_state.current()
    if state is not None:
        with _disable_current_modes():
            state.memory.keep_memory_of(storage)
    return call(storage, size)


def install() -> None:
    """Let a capture resize the storages that it allocated."""
    why = "memory of a graph stays the graph's when its tensor gives it back in the capture"
    wrap(torch.UntypedStorage, "resize_", _resize, why)
