"""The memory of graphs: the tensors in a pool, and references that do not keep memory allocated."""

import gc
import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def alias_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor over ``storage`` with the layout of ``tensor``.

    It has the dtype, shape, strides, storage offset and the conjugate and negative bits of ``tensor``, is on the device
    of ``storage``, and takes no part in autograd.
    """
    alias = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    alias.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        torch._C._set_conj(alias, True)
    if tensor.is_neg():
        torch._C._set_neg(alias, True)
    return alias


def weak_reference(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the memory of ``tensor`` that does not keep it allocated, and takes no part in autograd.

    Once no other tensor holds the memory, graphs that are captured later into the same pool may use it: read the
    results of a replay before those graphs replay. The memory stays mapped as long as a graph of the pool lives.
    """
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    return alias_of(tensor, memory)


def storage_address(tensor: torch.Tensor) -> int:
    """Return the start address of the storage of ``tensor``."""
    return tensor.untyped_storage().data_ptr()


class PoolMemory:
    """The memory of a graph pool, from the allocator's list of its segments.

    Segments stay in a pool as long as a graph of the pool lives, so they are cached. The list is read again only for an
    address outside of all known segments, and only if the allocator has taken memory from the device since: reading it
    takes longer the more graphs the pool holds.

    Args:
        pool: Handle of a pool with captured graphs.
    """

    def __init__(self, pool: tuple[int, int]):
        self._pool = tuple(pool)
        self._segments: list[tuple[int, int]] = []
        self._reserved = -1

    @classmethod
    def of(cls, graph: torch.cuda.CUDAGraph) -> "PoolMemory":
        """Return the memory of the pool of ``graph``, as one object for all its graphs."""
        pool = tuple(graph.pool())
        memory = _memories.get(pool)
        if memory is None:
            memory = _memories[pool] = cls(pool)
        return memory

    def owned(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return the storage addresses of the ``tensors`` in the pool's memory."""
        addresses = {storage_address(tensor) for tensor in tensors if tensor.is_cuda and tensor.numel()}
        if not all(map(self._has, addresses)):
            self._read_segments()
        return set(filter(self._has, addresses))

    def _has(self, address: int) -> bool:
        place = bisect_right(self._segments, (address, sys.maxsize)) - 1
        return place >= 0 and address < self._segments[place][1]

    def size(self) -> int:
        """Return the size of the pool in bytes."""
        self._read_segments()
        return sum(end - start for start, end in self._segments)

    def _read_segments(self) -> None:
        reserved = torch.cuda.memory_stats()["reserved_bytes.all.allocated"]  # never goes down
        if reserved == self._reserved:
            return
        self._reserved = reserved
        # Before 2.15, torch drops a reference to each of these numbers; small ones are never freed.
        pool = self._pool if max(self._pool) <= 256 else None
        self._segments = sorted(
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in torch.cuda.memory_snapshot(mempool_id=pool, include_traces=False)
            if tuple(segment["segment_pool_id"]) == self._pool
        )


_memories: weakref.WeakValueDictionary[tuple, PoolMemory] = weakref.WeakValueDictionary()


def release_cached_memory() -> None:
    """Return the allocator's cached memory to the device: graphs have their own pool and cannot use it.

    Collect only younger generations of garbage: a walk through all objects can take longer than the capture.
    """
    gc.collect(1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


REUSE_OPTION = "graph_capture_record_stream_reuse"


@contextmanager
def reuse_across_streams() -> Iterator[None]:
    """Allow captures to reuse freed memory that several streams have used.

    By default, the allocator keeps it until the capture ends. With torch's option ``graph_capture_record_stream_reuse``
    it checks in the graph whether all its uses come before. A value in ``PYTORCH_CUDA_ALLOC_CONF`` takes precedence.
    """
    current = allocator_settings()
    configured: str = current["PYTORCH_CUDA_ALLOC_CONF"]
    if REUSE_OPTION in configured or REUSE_OPTION not in current:
        yield
        return
    _configure_allocator(configured, f"{REUSE_OPTION}:True")
    try:
        yield
    finally:
        _configure_allocator(configured, f"{REUSE_OPTION}:False")
        _configure_allocator(configured)


def allocator_settings() -> dict[str, Any]:
    """Return the allocator's settings by name, and the text of the environment variable under its name."""
    no_pool = (1, 1)  # has no segments to list; not a new handle, see PoolMemory
    return torch._C._cuda_memorySnapshot(no_pool)["allocator_settings"]


def _configure_allocator(*settings: str) -> None:
    # Omitted options return to their defaults, except for switches like this one.
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, settings)))
