"""Copies between parts of Megatron-FSDP's buffers that are the same in every step, planned once."""

from collections import defaultdict
from collections.abc import Iterable
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch

from .mixed_precision import is_float8tensor

_DATA, _ADDRESS = attrgetter("data"), methodcaller("data_ptr")


class PlannedCopies:
    """Copies from some 1-D tensors to others, with as few launches as possible.

    Neighbours in memory, among the sources as among the destinations, are copied as one.

    Args:
        pairs: Destination and source of each copy, contiguous 1-D views of equal length, any dtypes; empty ones are
            left out.
        buffers: The ``DataParallelBuffer``s that the tensors are parts of.

    Attributes:
        placement: Where ``buffers`` had their data when the copies were planned.
    """

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], buffers: Iterable[Any]):
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
        self.placement = Placement(buffers)

    @torch.no_grad()
    def run(self) -> None:
        """Copy everything."""
        for tos, sources in self._calls.values():
            torch._foreach_copy_(tos, sources)


class Placement:
    """Where buffers of Megatron-FSDP (``DataParallelBuffer``) keep their data, to notice that it was replaced."""

    def __init__(self, buffers: Iterable[Any]):
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


def copies_of_weights(buffer: Any) -> PlannedCopies | None:
    """Plan the copies of the optimizer's weights to the shards of the model's weights, after a step of the optimizer.

    Args:
        buffer: The ``ParamAndGradBuffer`` that holds both.

    Returns:
        None if weights are quantized, or written to parameters, and not only copied between buffers.
    """
    pairs, buffers = [], []
    for group in buffer.parameter_groups:
        main, model = group.main_weight_buffer, group.model_weight_buffer
        if main is None:
            continue
        if model is None or group.transpose_weight_buffer is not None or any(map(is_float8tensor, group.params)):
            return None
        buffers += [main, model]
        only_shard = main.is_data_distributed or model.is_data_distributed
        for item in map(main.param_idx.__getitem__, group.params):
            # .data: the copy must not count as a change of the parameters that are views of the buffer
            to = model.get_item(item, only_shard=only_shard).data
            pairs.append((to, main.get_item(item, only_shard=only_shard)))
    return PlannedCopies(pairs, buffers)


def _precedes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.storage_offset() + first.numel() == second.storage_offset()
    )


def _extended(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first.as_strided((first.numel() + second.numel(),), (1,))
