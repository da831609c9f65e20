"""Which CPU storages stand for host memory. All others stand for device memory.

The mark is on the storage, so views share it; results of operations outside a capture do not inherit it. A storage
without a mark counts as device memory, as do tensors that torch's own code creates.
"""

import contextlib
from collections.abc import Iterator

import torch

_MARK, _PINNED = "is_host_memory", "is_pinned_memory"

_in_host_factory = False


def making_host_tensor() -> bool:
    """Whether an operator without tensor arguments is called by a factory for a host tensor."""
    return _in_host_factory


@contextlib.contextmanager
def host_factory(on_host: bool = True) -> Iterator[None]:
    """Tell the tape where a factory called in this block puts its tensor."""
    global _in_host_factory
    before, _in_host_factory = _in_host_factory, on_host
    try:
        yield
    finally:
        _in_host_factory = before


def mark_host(tensor: torch.Tensor, pinned: bool = False) -> torch.Tensor:
    """Mark ``tensor``'s storage as host memory, pinned or not, and return ``tensor``."""
    if tensor.layout is torch.strided and tensor.device.type == "cpu":
        storage = tensor.untyped_storage()
        setattr(storage, _MARK, True)
        if pinned:
            setattr(storage, _PINNED, True)
    return tensor


def is_host(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is known to lie in host memory."""
    return _has(tensor, _MARK)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is known to lie in pinned host memory, which device copies in a capture may use."""
    return _has(tensor, _PINNED)


def _has(tensor: torch.Tensor, mark: str) -> bool:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    try:
        return getattr(tensor.untyped_storage(), mark, False)
    except (NotImplementedError, RuntimeError):  # tensor subclasses without a storage
        return False
