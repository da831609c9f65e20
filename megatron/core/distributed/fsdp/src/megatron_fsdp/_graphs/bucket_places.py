"""Where buckets of gathered weights and of gradients go, noted at capture and compared before each replay."""

from collections.abc import Hashable
from typing import Any

import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_global_memory_buffer
from megatron.core.transformer._cuda_graphs.engine.addresses import MovedBufferError

from ..planned_copies import Placement
from .unit import ADVICE


class BucketPlaces:
    """The places of buckets that graphs use while none of them is in use.

    Args:
        use: What the graphs do there, for errors: ``write gradients to``.
    """

    def __init__(self, use: str):
        self._use = use
        self._buffers: dict[int, tuple[Any, torch.dtype | None]] = {}  # by address
        self._fixed: dict[int, Hashable] | None = {}  # by address the memory's name; None if some has none
        # Allocators, which may put a bucket elsewhere while others are in use, and how many places each has.
        self._pools: dict[Any, int] = {}
        self._undivided: Placement | None = None  # buffers whose buckets are parts of their own data

    def note(self, buffer: Any, dtype: torch.dtype | None = None) -> None:
        """Note where ``buffer`` puts a bucket of ``dtype`` (its own if None) now."""
        address = _address_in(buffer, dtype)
        if address in self._buffers:
            return
        self._buffers[address] = buffer, dtype
        if not buffer.is_data_distributed and dtype in (None, buffer.dtype):
            self._undivided = self._undivided or Placement(())
            self._undivided.add(buffer)
            return
        named = get_global_memory_buffer().buffer.items()
        name = next((name for name, memory in named if memory.data_ptr() == address), None)
        allocator = buffer.temporary_bucket_allocator
        if name is None or not hasattr(allocator, "idle_buffer"):
            self._fixed = None
        elif self._fixed is not None:
            self._fixed[address] = name
            self._pools[allocator] = len(allocator.idle_buffer) + len(allocator.using_buffer)

    def check(self) -> None:
        """Make sure that buckets still go where they went. None of them is in use, before and after.

        Raises:
            MovedBufferError: one does not.
        """
        if self._nothing_moved():
            return
        for address, (buffer, dtype) in self._buffers.items():
            now = _address_in(buffer, dtype)
            if now != address:
                raise MovedBufferError(f"CUDA graphs {self._use} {address:#x}; now it would be {now:#x}. {ADVICE}")

    def _nothing_moved(self) -> bool:
        """Whether all memory is where it was, and all of it idle: then every bucket goes where it went."""
        if self._fixed is None or (self._undivided is not None and not self._undivided.unchanged()):
            return False
        if [len(pool.idle_buffer) for pool in self._pools] != [*self._pools.values()]:
            return False
        memory = get_global_memory_buffer().buffer
        return [memory[name].data_ptr() for name in self._fixed.values() if name in memory] == [*self._fixed]


def _address_in(buffer: Any, dtype: torch.dtype | None) -> int:
    """Where ``buffer`` would put a bucket now."""
    address: int = buffer.fetch_bucket(dtype=dtype).data.data_ptr()
    buffer.free_bucket_storage()
    return address
