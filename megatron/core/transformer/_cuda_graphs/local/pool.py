"""Keeps the memory pool of local graphs usable while no graph in it is alive."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..engine.capture import record_nothing

# By pool; an empty graph, which holds no memory.
_placeholders: dict[tuple, torch.cuda.CUDAGraph] = {}


def hold_pool(pool: tuple) -> None:
    """Keep ``pool`` usable until ``let_go_of_pools``; to be called before the first capture into it.

    torch refuses to capture into a pool all of whose graphs have been freed (an internal assertion of its allocators
    for the device and for pinned memory). Models come and go, and the pool stays: an empty graph keeps it in use.
    """
    if pool in _placeholders:
        return
    _placeholders[pool] = record_nothing(torch.cuda.CUDAGraph, pool)


def let_go_of_pools() -> None:
    """Let torch free the memory of the pools once no graph and no tensor uses it."""
    while _placeholders:
        _placeholders.popitem()[1].reset()


@contextmanager
def allocating_from(pool: tuple) -> Iterator[None]:
    """Serve this thread's allocations on the current device from ``pool``."""
    hold_pool(pool)
    device = torch.cuda.current_device()
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)  # drops the use count that beginAllocate added
