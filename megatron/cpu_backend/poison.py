"""Fills memory that must not be read with NaN, or with zero where the dtype has no NaN."""

import functools
from collections.abc import Callable

import torch


def poison(tensor: torch.Tensor) -> None:
    """Overwrite ``tensor``, of any strides."""
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
