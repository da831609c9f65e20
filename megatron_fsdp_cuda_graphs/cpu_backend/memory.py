"""Track host memory, memory pools of graphs, and the addresses that a tape reads and writes.

Tensors of a tape do not own their memory, so a graph keeps no input alive and does not follow ``param.data = other``.
Each replay checks all addresses.

A storage marked as host memory counts as such for all views; any other storage is device memory. Results of operations
on host tensors are marked only during a capture.

On a GPU, a later capture into a pool reuses memory that nothing references. Here memory is never reused. Instead, a
replay of a later graph of the pool first overwrites such memory with NaN, which exposes late reads.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from . import streams
from .patches import wrap

PoolHandle = tuple[int, int]
_Place = tuple[int, int]  # identity of a storage, address of its memory

_MARK, _PINNED = "is_host_memory", "is_pinned_memory"
_in_host_factory = False
_handles = itertools.count(1)
_pools: weakref.WeakValueDictionary[PoolHandle, Pool] = weakref.WeakValueDictionary()
_with_graphs: set[PoolHandle] = set()
_statistics: collections.Counter[str] = collections.Counter()


class StaleAddress(RuntimeError):
    """Raised if a replay would access memory that was freed, resized or moved since capture."""


def making_host_tensor() -> bool:
    """Return whether a factory function is creating a host tensor."""
    return _in_host_factory


@contextlib.contextmanager
def host_factory(on_host: bool = True) -> Iterator[None]:
    """Within the context, treat tensors made by factory functions as host tensors if ``on_host``."""
    global _in_host_factory
    before, _in_host_factory = _in_host_factory, on_host
    try:
        yield
    finally:
        _in_host_factory = before


def mark_host(tensor: torch.Tensor, pinned: bool = False) -> torch.Tensor:
    """Mark the storage of ``tensor`` as host memory, and return ``tensor``."""
    if tensor.layout is torch.strided and tensor.device.type == "cpu":
        storage = tensor.untyped_storage()
        setattr(storage, _MARK, True)
        if pinned:
            setattr(storage, _PINNED, True)
    return tensor


def is_host(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is marked as host memory."""
    return _has(tensor, _MARK)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is marked as pinned host memory, which captures can copy to and from."""
    return _has(tensor, _PINNED)


def _has(tensor: torch.Tensor, mark: str) -> bool:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    try:
        return getattr(tensor.untyped_storage(), mark, False)
    except (NotImplementedError, RuntimeError):  # a tensor subclass without a storage
        return False


def poison(tensor: torch.Tensor) -> None:
    """Fill ``tensor`` with NaN, or with zero if its dtype has no NaN, to expose reads."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor.zero_()
    elif tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0x7F)  # NaN in all 8-bit floats of torch
    else:
        tensor.fill_(float("nan"))


def poisoning(raw: torch.Tensor, dtype: torch.dtype) -> Callable[[], object]:
    """Return a function that poisons ``raw``, the bytes of a storage of ``dtype``."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return raw.zero_
    whole = raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return functools.partial(poison, whole)


class Pool:
    """Tracks the storages that captures allocate in one pool. The graphs of the pool keep it alive."""

    def __init__(self, handle: PoolHandle) -> None:
        self.handle = handle
        self._owned: dict[int, list[torch.Tensor]] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def add_graph(self) -> None:
        """Record that a graph was captured into the pool."""
        _with_graphs.add(self.handle)

    def own(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
        """Keep ``storage`` of ``dtype`` alive, and return a tensor of its bytes."""
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._owned.setdefault(storage._cdata, []).append(whole)
        self._dtypes[storage._cdata] = dtype
        _statistics["reserved_bytes.all.allocated"] += whole.numel()
        return whole

    def release(self, storage: torch.UntypedStorage) -> None:
        """Shrink the pool's views of ``storage`` to no elements: they keep it alive, but it can be resized."""
        for whole in self._owned[storage._cdata]:
            whole.set_(storage, 0, (0,), (1,))

    def overwrite_abandoned(self) -> list[Callable[[], object]]:
        """Return functions that poison storages to which only the pool refers; each storage is returned only once."""
        abandoned = [
            key
            for key, wholes in self._owned.items()
            if key in self._dtypes and _is_abandoned(key, wholes) and _is_whole(wholes[-1])
        ]
        return [poisoning(self._owned[key][-1], self._dtypes.pop(key)) for key in abandoned]


def _is_abandoned(key: int, wholes: list[torch.Tensor]) -> bool:
    """Return whether only the pool's own tensors, ``wholes``, reference the storage ``key``."""
    # The count includes the tensors and the Python object of the storage.
    return bool(torch._C._storage_Use_Count(key) <= 1 + len(wholes))


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether the storage of ``tensor`` still has all its bytes."""
    return tensor.untyped_storage().nbytes() >= tensor.numel()


def segments(mempool_id: PoolHandle | None = None, include_traces: bool = True) -> list[dict[str, object]]:
    """Replace ``torch.cuda.memory_snapshot``; return the memory of graph pools."""
    return [
        {"address": wholes[-1].data_ptr(), "total_size": wholes[-1].numel(), "segment_pool_id": pool.handle}
        for pool in list(_pools.values())
        if mempool_id is None or pool.handle == mempool_id
        for wholes in pool._owned.values()
    ]


def statistics(device: object = None) -> dict[str, int]:
    """Replace ``torch.cuda.memory_stats``; count the bytes allocated by graph pools. Other values are zero."""
    return collections.defaultdict(int, _statistics)


def new_handle() -> PoolHandle:
    """Return the handle of a new pool."""
    return (0, next(_handles))


def pool_of(handle: PoolHandle | None) -> Pool:
    """Return the pool of ``handle``, or a new pool for None or an unused handle.

    Raises:
        RuntimeError: All graphs of the pool are deleted, as in torch.
    """
    key = new_handle() if handle is None else handle
    pool = _pools.get(key)
    if pool is None:
        if key in _with_graphs:
            raise RuntimeError(
                f"it->second->use_count > 0 INTERNAL ASSERT FAILED: all graphs of pool {key} were deleted; use a "
                "new pool"
            )
        pool = _pools[key] = Pool(key)
    return pool


def alias_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of ``storage`` with the dtype, layout, and conjugate and negative bits of ``tensor``."""
    alias = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    alias.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        torch._C._set_conj(alias, True)
    if tensor.is_neg():
        torch._C._set_neg(alias, True)
    return alias


@dataclass(slots=True)
class Block:
    """A storage as it was at its first use in a capture.

    Attributes:
        ref: Weak reference to the storage.
        pointer, nbytes: Its address and size.
        raw: Its bytes, a uint8 tensor that does not own them.
        dtype: Dtype of the tensor that used it first.
        user: First operator that used it, with the tensor's shape and dtype, for errors.
        is_private: Whether the capture allocated it.
        before: For memory from outside the capture, its bytes before the first write.
        aliases: Tensors of the tape in this memory.
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
        """Return how this memory changed since capture; None if it did not."""
        if not self.nbytes:
            return None
        now = torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)
        if now is None:
            return "was freed"
        if now.nbytes() < self.nbytes:
            return f"was resized from {self.nbytes} to {now.nbytes()} bytes"
        return "was moved" if now.data_ptr() != self.pointer else None


class AddressBook:
    """The memory that one recorded graph (tape) uses, by address. The tape allocates from ``pool``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._blocks: dict[_Place, Block] = {}
        # Bytes of each private storage.
        self._private: dict[_Place, torch.Tensor] = {}
        self._private_storages: set[int] = set()
        self._private_addresses: set[int] = set()

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def block(self, tensor: torch.Tensor, op: str, is_private: bool = False) -> Block:
        """Return the block of ``tensor``; create the block on first use.

        Args:
            tensor: A tensor that the capture uses.
            op: Name of the operator that uses it, for errors.
            is_private: Whether the capture is known to have allocated its memory.
        """
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
        """Return whether the capture allocated the storage or the address of ``place``."""
        storage, pointer = place
        return storage in self._private_storages or (pointer != 0 and pointer in self._private_addresses)

    def _own(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        self._private[_place(storage)] = self._pool.own(storage, dtype)
        self._private_storages.add(storage._cdata)
        self._private_addresses.add(storage.data_ptr())

    def alias(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Return an alias of ``tensor`` that does not own its memory."""
        block = self.block(tensor, op)
        block.aliases.append(alias_of(tensor, block.raw.untyped_storage()))
        return block.aliases[-1]

    def keep_memory_of(self, storage: torch.UntypedStorage) -> None:
        """Make the tape use a copy of ``storage``, which is about to be resized, if the capture allocated it.

        On a GPU the memory would stay in the pool of the graph.
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
        """Arguments of torch's address check: tensors of private memory, with their addresses and indices."""
        return list(self._private.values()), [pointer for _, pointer in self._private], list(range(len(self._private)))

    def check(self) -> None:
        """Check that all memory of captured operators is unchanged since the end of the capture.

        Raises:
            StaleAddress: Memory was freed, resized or moved. The message names the first operator that used it.
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
            f"the graph uses memory that {problem} after capture: {block.user}. Keep all tensors of a graph alive "
            f"and in place, and copy new values into them."
        )


def _bytes_at(pointer: int, nbytes: int) -> torch.Tensor:
    if nbytes == 0 or pointer == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(pointer), dtype=torch.uint8)


def _place(storage: torch.UntypedStorage) -> _Place:
    return storage._cdata, storage.data_ptr()


def _resize(call: Callable, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    state = streams.current_capture()
    if state is not None:
        with _disable_current_modes():
            state.memory.keep_memory_of(storage)
    return call(storage, size)


def install() -> None:
    """Allow a capture to resize storages that it has allocated."""
    wrap(torch.UntypedStorage, "resize_", _resize)
