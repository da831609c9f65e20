"""Tensors that say where memory of a graph is without keeping it from being used again."""

import torch


def weak_reference(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory, shape, strides and dtype that does not keep the memory.

    Once no other tensor holds it, graphs that are captured later into the same pool may use the memory: what a replay
    puts there must be read before those graphs replay. The memory itself stays mapped as long as a graph of the pool
    lives.
    """
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
