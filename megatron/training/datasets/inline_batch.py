"""Batches whose small tensors travel from a data loader's worker to the training process within its message.

For each tensor the training process asks the worker for its memory, over a socket of its own (torch.multiprocessing's
sharing strategy ``file_descriptor``). A thread of the data loader does that in Python, beside the thread that trains.
A copy of a small tensor costs that thread less.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate, get_worker_info

LARGE = 2**17  # bytes; from about 256 KiB the memory is asked for in less time than the copy takes


class Content(NamedTuple):
    """A tensor on its way.

    Attributes:
        data: Its bytes.
        dtype: Its dtype.
        shape: Its shape.
    """

    data: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Content":
        """Return what ``tensor`` holds."""
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return cls(data, tensor.dtype, tuple(tensor.shape))

    def tensor(self) -> torch.Tensor:
        """Return the tensor."""
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).view(self.shape)


class InlineBatch(dict[str, torch.Tensor]):
    """A batch that arrives in another process as a plain ``dict``."""

    def __reduce__(self) -> tuple[Any, ...]:
        small = {name: Content.of(tensor) for name, tensor in self.items() if _is_small(tensor)}
        return _arrived, ({**self, **small},)


def collate(samples: Sequence[Any]) -> Any:
    """Return ``torch.utils.data.default_collate(samples)``, as an ``InlineBatch`` if it is a dictionary of tensors."""
    batch = default_collate(samples)
    plain = type(batch) is dict and all(type(value) is torch.Tensor for value in batch.values())
    return InlineBatch(batch) if plain and get_worker_info() is not None else batch


def _is_small(tensor: torch.Tensor) -> bool:
    ordinary = tensor.is_cpu and tensor.layout is torch.strided and not tensor.requires_grad
    return ordinary and 0 < tensor.nbytes < LARGE


def _arrived(items: dict[str, Content | torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: item.tensor() if isinstance(item, Content) else item for name, item in items.items()}
