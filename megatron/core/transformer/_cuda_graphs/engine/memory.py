"""The memory of graphs: which tensors are in their pool, and references that do not keep it allocated."""

import gc
import sys
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


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


def weak_reference(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the memory of ``tensor`` that does not keep it allocated, and takes no part in autograd.

    Once no other tensor holds it, graphs that are captured later into the same pool may use the memory: results of a
    replay must be read before those graphs replay. The memory stays mapped as long as a graph of the pool lives.
    """
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    return alias_of(tensor, memory)


def storage_address(tensor: torch.Tensor) -> int:
    """The address at which the storage of ``tensor`` starts."""
    return tensor.untyped_storage().data_ptr()


def lies_in(stretches: Sequence[tuple[int, int]], address: int) -> bool:
    """Whether ``address`` is in one of ``stretches`` of memory, sorted, each from its first address to its end."""
    place = bisect_right(stretches, (address, sys.maxsize)) - 1
    return place >= 0 and address < stretches[place][1]


class PoolMemory:
    """The memory of a graph pool, from the allocator's list of its segments.

    Segments stay in a pool as long as a graph of the pool lives, so they can be cached while a caller holds one. The
    allocator is asked again only about addresses outside of all known segments, and only if it has taken memory from
    the device since: a snapshot takes longer the more graphs the pool holds.

    Args:
        pool: The handle of a pool that graphs have been captured into.
    """

    def __init__(self, pool: tuple[int, int]):
        self._pool = tuple(pool)
        self._segments: list[tuple[int, int]] = []
        self._reserved = -1

    @classmethod
    def of(cls, graph: torch.cuda.CUDAGraph) -> "PoolMemory":
        """Return the memory of the pool of ``graph``; one object for all graphs of the pool."""
        pool = tuple(graph.pool())
        memory = _memories.get(pool)
        if memory is None:
            memory = _memories[pool] = cls(pool)
        return memory

    def owned(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return the storage addresses of those ``tensors`` whose memory belongs to the pool."""
        addresses = {storage_address(tensor) for tensor in tensors if tensor.is_cuda and tensor.numel()}
        if not all(lies_in(self._segments, address) for address in addresses):
            self._look()
        return {address for address in addresses if lies_in(self._segments, address)}

    def size(self) -> int:
        """Return the bytes of its segments."""
        self._look()
        return sum(end - start for start, end in self._segments)

    def _look(self) -> None:
        reserved = torch.cuda.memory_stats()["reserved_bytes.all.allocated"]  # never goes down
        if reserved == self._reserved:
            return
        self._reserved = reserved
        # Before 2.15 torch takes away a reference to each of these numbers; small ones are never freed.
        pool = self._pool if max(self._pool) <= 256 else None
        self._segments = sorted(
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in torch.cuda.memory_snapshot(mempool_id=pool, include_traces=False)
            if tuple(segment["segment_pool_id"]) == self._pool
        )


_memories: weakref.WeakValueDictionary[tuple, PoolMemory] = weakref.WeakValueDictionary()


def release_cached_memory() -> None:
    """Return the allocator's cached memory to the device: graphs, which have a pool of their own, cannot use it.

    Of garbage only the younger generations are collected: a walk through all objects can take longer than the capture.
    """
    gc.collect(1)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


REUSE_OPTION = "graph_capture_record_stream_reuse"


@contextmanager
def reuse_across_streams() -> Iterator[None]:
    """Let captures allocate memory again that a tensor freed which several streams used.

    The allocator otherwise keeps it until the capture ends. With torch's option ``graph_capture_record_stream_reuse``
    it asks the graph whether all work on it comes before. What ``PYTORCH_CUDA_ALLOC_CONF`` says of the option holds.
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
    """Return the allocator's settings by name, and under the name of the environment variable its text."""
    no_pool = (1, 1)  # which has no segments to list; not a new handle, see PoolMemory
    return torch._C._cuda_memorySnapshot(no_pool)["allocator_settings"]


def _configure_allocator(*settings: str) -> None:
    # Options that are left out get their default values back, but for switches such as this one.
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, settings)))
