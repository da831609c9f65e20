"""Batches whose small tensors travel from a data loader's worker to the training process as one tensor.

For each tensor the training process asks the worker for its memory, over a socket of its own (torch.multiprocessing's
sharing strategy ``file_descriptor``). A thread of the data loader does that in Python, beside the thread that trains.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate, get_worker_info

LARGE = 2**20  # bytes; a larger tensor is not copied once more
ALIGNMENT = 16  # bytes, of the start of each tensor


class Place(NamedTuple):
    """Where a tensor is in the joined one, and what it is.

    Attributes:
        begin: Of its first byte.
        end: Behind its last byte.
    """

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class JoinedBatch(dict[str, torch.Tensor]):
    """A batch that arrives in another process as a plain ``dict``; its small tensors are views of one."""

    def __reduce__(self) -> tuple[Any, ...]:
        places, end = {}, 0
        for name, tensor in self.items():
            if tensor.nbytes < LARGE:
                begin = -(-end // ALIGNMENT) * ALIGNMENT
                end = begin + tensor.nbytes
                places[name] = Place(begin, end, tuple(tensor.shape), tensor.dtype)
        joined = torch.empty(end, dtype=torch.uint8)
        for name, place in places.items():
            _at(joined, place).copy_(self[name])
        return _separated, (joined, {name: places.get(name, tensor) for name, tensor in self.items()})


def collate(samples: Sequence[Any]) -> Any:
    """Return ``torch.utils.data.default_collate(samples)``, joined on its way if it is a dictionary of tensors."""
    batch = default_collate(samples)
    plain = type(batch) is dict and all(type(value) is torch.Tensor for value in batch.values())
    return JoinedBatch(batch) if plain and get_worker_info() is not None else batch


def _separated(joined: torch.Tensor, items: dict[str, Place | torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _at(joined, item) if isinstance(item, Place) else item for name, item in items.items()}


def _at(joined: torch.Tensor, place: Place) -> torch.Tensor:
    return joined[place.begin : place.end].view(place.dtype).view(place.shape)
