"""What memory holds that nobody may read: NaN, or zero where the dtype has none."""

import functools
from collections.abc import Callable

import torch


def poisoning(raw: torch.Tensor, dtype: torch.dtype) -> Callable[[], object]:
    """Return a call that poisons ``raw``, the bytes of a storage whose tensors are of ``dtype``."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return raw.zero_
    size = torch.empty(0, dtype=dtype).element_size()
    if size == 1:
        return functools.partial(raw.fill_, 0x7F)  # NaN in every 8-bit float of torch
    return functools.partial(raw[: raw.numel() // size * size].view(dtype).fill_, float("nan"))
