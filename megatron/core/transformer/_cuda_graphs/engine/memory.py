"""Graph memory pools, and references that do not keep pool memory allocated."""

import gc
import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def weak_reference(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached alias of ``tensor`` that does not keep its memory allocated.

    Once no other tensor uses the memory, graphs captured later into the same pool may reuse it, so read the results of
    a replay before these graphs replay. The memory stays mapped while any graph of the pool is alive.
    """
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    alias.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        torch._C._set_conj(alias, True)
    if tensor.is_neg():
        torch._C._set_neg(alias, True)
    return alias


def storage_address(tensor: torch.Tensor) -> int:
    """Return the start address of the storage of ``tensor``."""
    return tensor.untyped_storage().data_ptr()


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place writes to ``tensor``; -1 for inference tensors, whose writes are not counted."""
    return -1 if tensor.is_inference() else tensor._version


class PoolMemory:
    """Memory segments of the graph pool with a given handle, as listed by the allocator.

    The list is cached: segments stay in a pool while any of its graphs is alive, and reading the list takes longer the
    more graphs the pool contains. It is read again only for an address outside all known segments, and only if the
    allocator has reserved more memory since.
    """

    def __init__(self, pool: tuple[int, int]):
        self._pool = tuple(pool)
        self._segments: list[tuple[int, int]] = []
        self._reserved = -1

    @classmethod
    def of(cls, graph: torch.cuda.CUDAGraph) -> "PoolMemory":
        """Return the memory of the pool of ``graph``, one object per pool."""
        pool = tuple(graph.pool())
        memory = _memories.get(pool)
        if memory is None:
            memory = _memories[pool] = cls(pool)
        return memory

    def owned(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return the storage addresses of all ``tensors`` in the pool."""
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
        reserved = torch.cuda.memory_stats()["reserved_bytes.all.allocated"]  # a cumulative counter
        if reserved == self._reserved:
            return
        self._reserved = reserved
        # Before 2.15, torch decrements the reference count of each integer once too often; small ones are immortal.
        pool = self._pool if max(self._pool) <= 256 else None
        self._segments = sorted(
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in torch.cuda.memory_snapshot(mempool_id=pool, include_traces=False)
            if tuple(segment["segment_pool_id"]) == self._pool
        )


_memories: weakref.WeakValueDictionary[tuple, PoolMemory] = weakref.WeakValueDictionary()


def release_cached_memory() -> None:
    """Return the allocator's cached memory to the device: graphs have their own pool and cannot use it.

    Only younger generations of garbage are collected, because a full collection can take longer than the capture.
    """
    gc.collect(1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


REUSE_OPTION = "graph_capture_record_stream_reuse"


@contextmanager
def reuse_across_streams() -> Iterator[None]:
    """Context manager that lets captures reuse freed memory that was used on several streams.

    By default, the allocator keeps such memory until the capture ends. With torch's option
    ``graph_capture_record_stream_reuse``, it reuses the memory once all its uses precede the allocation in the graph. A
    value in ``PYTORCH_CUDA_ALLOC_CONF`` takes precedence.
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
    """Return the allocator's settings by name, including the string ``PYTORCH_CUDA_ALLOC_CONF``."""
    no_pool = (1, 1)  # not a pool; small integers are immortal, see PoolMemory
    return torch._C._cuda_memorySnapshot(no_pool)["allocator_settings"]


def _configure_allocator(*settings: str) -> None:
    # Omitted options revert to their defaults, except for boolean ones like REUSE_OPTION.
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, settings)))
