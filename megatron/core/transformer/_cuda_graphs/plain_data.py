"""Numbers and the like, alone or in lists, dictionaries and so on: values that are compared with a copy of before."""

from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch


def kept(value: Any) -> Any:
    """Return what to compare ``value`` with later: a copy if it is data that can change in place, and else itself.

    A list, say, with a tensor in it is not copied: those are mostly results, or caches. Neither are tensors on the
    device, which replays read; a number in a tensor on the host becomes a part of an operation.
    """
    if isinstance(value, torch.Tensor):
        return value.clone() if value.device.type == "cpu" and not value.ndim else value
    if not _is_data(value):
        return value
    if isinstance(value, dict):
        return {key: kept(each) for key, each in value.items()}
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**kept(vars(value)))
    for kind in (list, set):
        if isinstance(value, kind):
            return kind(map(kept, value))
    return tuple(map(kept, value)) if type(value) is tuple else value


def differ(one: Any, other: Any) -> bool:
    """Whether two values are neither the same nor equal."""
    try:
        return one is not other and bool(one != other)
    except Exception:  # tensors, of which each element is compared
        return True


def _is_data(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_data, value.values()))
    if isinstance(value, SimpleNamespace):
        return _is_data(vars(value))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_data, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, Enum, torch.dtype))
