"""Copies between parts of Megatron-FSDP's buffers that are the same in every step, planned once."""

from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch

_DATA, _ADDRESS = attrgetter("data"), methodcaller("data_ptr")


class PlannedCopies:
    """Copies from some 1-D tensors to others, with as few launches as possible.

    Neighbours in memory, among the sources as among the destinations, are copied as one.

    Attributes:
        count: How many tensors are copied, neighbours counted as one.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]):
        """Plan the copies.

        Args:
            pairs: Destination and source of each copy, contiguous 1-D views of equal length, any dtypes; empty ones are
                left out.
        """
        self._calls: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for to, source in pairs:
            if not to.numel():
                continue
            tos, sources = self._calls[to.dtype, source.dtype]
            if tos and _precedes(tos[-1], to) and _precedes(sources[-1], source):
                tos[-1], sources[-1] = _extended(tos[-1], to), _extended(sources[-1], source)
            else:
                tos.append(to)
                sources.append(source)
        self.count = sum(len(tos) for tos, _ in self._calls.values())

    @torch.no_grad()
    def run(self) -> None:
        """Copy everything."""
        for tos, sources in self._calls.values():
            torch._foreach_copy_(tos, sources)


class Placement:
    """Where buffers of Megatron-FSDP (``DataParallelBuffer``) keep their data, to notice that it was replaced."""

    def __init__(self, buffers: Iterable[Any]):
        """Note where each of ``buffers`` has its data now."""
        self._buffers: list[Any] = []
        self._data: list[torch.Tensor] = []
        self._addresses: list[int] = []
        for buffer in buffers:
            self.add(buffer)

    def add(self, buffer: Any) -> None:
        """Note where ``buffer`` has its data now."""
        self._buffers.append(buffer)
        self._data.append(buffer.data)
        self._addresses.append(buffer.data.data_ptr())

    def unchanged(self) -> bool:
        """Whether all the data is where it was."""
        held = map(_DATA, self._buffers)
        return all(map(is_, held, self._data)) and [*map(_ADDRESS, self._data)] == self._addresses


def _precedes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.storage_offset() + first.numel() == second.storage_offset()
    )


def _extended(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first.as_strided((first.numel() + second.numel(),), (1,))
