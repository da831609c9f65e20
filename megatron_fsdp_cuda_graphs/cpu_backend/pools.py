"""Private memory pools of graphs: what a capture allocates lives as long as a graph of its pool does.

On a GPU, later captures into the pool may use memory that no tensor holds any more. Here memory is never used twice;
instead, each later graph of the pool overwrites such memory with NaN when its replay begins, so that a read which comes
too late shows here too.
"""

from __future__ import annotations

import collections
import functools
import itertools
import weakref
from collections.abc import Callable

import torch

PoolHandle = tuple[int, int]

_handles = itertools.count(1)
_pools: weakref.WeakValueDictionary[PoolHandle, Pool] = weakref.WeakValueDictionary()
_with_graphs: set[PoolHandle] = set()
_statistics: collections.Counter[str] = collections.Counter()


def poison(tensor: torch.Tensor) -> None:
    """Fill ``tensor``, of any strides, which must not be read, with NaN, or with zero where its dtype has no NaN."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor.zero_()
    elif tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0x7F)  # NaN in every 8-bit float of torch
    else:
        tensor.fill_(float("nan"))


def poisoning(raw: torch.Tensor, dtype: torch.dtype) -> Callable[[], object]:
    """Return a call that poisons ``raw``, the bytes of a storage whose tensors are of ``dtype``."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return raw.zero_
    whole = raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return functools.partial(poison, whole)


class Pool:
    """The storages that captures into one pool have allocated. The graphs of the pool keep it alive."""

    def __init__(self, handle: PoolHandle) -> None:
        self.handle = handle
        self._owned: dict[int, list[torch.Tensor]] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def add_graph(self) -> None:
        """Say that a graph of the pool was captured."""
        _with_graphs.add(self.handle)

    def own(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
        """Keep ``storage``, whose tensors are of ``dtype``, alive; return a tensor of its bytes."""
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._owned.setdefault(storage._cdata, []).append(whole)
        self._dtypes[storage._cdata] = dtype
        _statistics["reserved_bytes.all.allocated"] += whole.numel()
        return whole

    def release(self, storage: torch.UntypedStorage) -> None:
        """Forget the bytes of ``storage``, which are about to be freed, but keep the storage itself."""
        for whole in self._owned[storage._cdata]:
            whole.set_(storage, 0, (0,), (1,))

    def overwrite_abandoned(self) -> list[Callable[[], object]]:
        """Return calls that poison the storages that only the pool holds, each storage once."""
        abandoned = [
            key
            for key, wholes in self._owned.items()
            if key in self._dtypes and _is_abandoned(key, wholes) and _is_whole(wholes[-1])
        ]
        return [poisoning(self._owned[key][-1], self._dtypes.pop(key)) for key in abandoned]


def _is_abandoned(key: int, wholes: list[torch.Tensor]) -> bool:
    """Whether only the pool holds the storage ``key``, of whose bytes it has the tensors ``wholes``."""
    # torch counts the tensors on a storage, and the Python object that has stood for it
    return bool(torch._C._storage_Use_Count(key) <= 1 + len(wholes))


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether the storage of ``tensor`` still has the bytes that it had; a program may have resized it."""
    return tensor.untyped_storage().nbytes() >= tensor.numel()


def segments(mempool_id: PoolHandle | None = None, include_traces: bool = True) -> list[dict[str, object]]:
    """What ``torch.cuda.memory_snapshot`` says of the memory of graph pools; there is no other."""
    return [
        {"address": wholes[-1].data_ptr(), "total_size": wholes[-1].numel(), "segment_pool_id": pool.handle}
        for pool in list(_pools.values())
        if mempool_id is None or pool.handle == mempool_id
        for wholes in pool._owned.values()
    ]


def statistics(device: object = None) -> dict[str, int]:
    """What ``torch.cuda.memory_stats`` says: all bytes that graph pools were ever given; zero for all else."""
    return collections.defaultdict(int, _statistics)


def new_handle() -> PoolHandle:
    """A handle that no pool has yet."""
    return (0, next(_handles))


def pool_of(handle: PoolHandle | None) -> Pool:
    """The living pool of ``handle``, or a new one; ``None`` always makes a new one.

    Raises:
        RuntimeError: every graph of the pool is gone, as torch's allocator of pinned memory says it.
    """
    key = new_handle() if handle is None else handle
    pool = _pools.get(key)
    if pool is None:
        if key in _with_graphs:
            raise RuntimeError(f"it->second->use_count > 0 INTERNAL ASSERT FAILED: no graph of pool {key} is left")
        pool = _pools[key] = Pool(key)
    return pool
