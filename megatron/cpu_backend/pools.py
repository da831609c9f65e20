"""Private memory pools of graphs: what a capture allocates lives as long as a graph of its pool does.

Memory is never shared between graphs of one pool here, so a graph that overwrites another's outputs on a GPU does not
show on this backend.
"""

from __future__ import annotations

import itertools
import weakref

import torch

PoolHandle = tuple[int, int]

_handles = itertools.count(1)
_pools: weakref.WeakValueDictionary[PoolHandle, Pool] = weakref.WeakValueDictionary()


class Pool:
    """The storages that captures of one pool have allocated. Graphs hold it; the last one frees it."""

    def __init__(self, handle: PoolHandle) -> None:
        self.handle = handle
        self.storages: list[torch.UntypedStorage] = []


def new_handle() -> PoolHandle:
    """A handle that no pool has yet."""
    return (0, next(_handles))


def pool_of(handle: PoolHandle | None) -> Pool:
    """The living pool of ``handle``, or a new one; ``None`` always makes a new one."""
    key = new_handle() if handle is None else handle
    pool = _pools.get(key)
    if pool is None:
        pool = _pools[key] = Pool(key)
    return pool
