"""Which CPU storages stand for host memory. All others stand for device memory.

The mark sits on the storage, so views share it; results of operations outside a capture do not inherit it. A storage
without a mark is taken for device memory: nothing is known of tensors that torch makes inside its own code.
"""

import torch


def mark_host(tensor: torch.Tensor) -> torch.Tensor:
    """Mark ``tensor``'s storage as host memory and return ``tensor``."""
    if tensor.layout is torch.strided and tensor.device.type == "cpu":
        tensor.untyped_storage().is_host_memory = True  # type: ignore[attr-defined]
    return tensor


def is_host(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is known to lie in host memory."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    try:
        return getattr(tensor.untyped_storage(), "is_host_memory", False)
    except (NotImplementedError, RuntimeError):  # tensor subclasses without a storage, such as DTensor
        return False
