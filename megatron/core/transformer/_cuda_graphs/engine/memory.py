"""Tensors that say where memory of a graph is without keeping it from being used again."""

import torch

from megatron_fsdp_cuda_graphs.tensor_alias import alias_of


def weak_reference(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is in all like ``tensor``, but does not keep its memory, and takes no part in autograd.

    Once no other tensor holds it, graphs that are captured later into the same pool may use the memory: what a replay
    puts there must be read before those graphs replay. The memory itself stays mapped as long as a graph of the pool
    lives.
    """
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    return alias_of(tensor, memory)


def storage_address(tensor: torch.Tensor) -> int:
    """Where the memory of ``tensor`` starts, whatever part of it the tensor shows."""
    return tensor.untyped_storage().data_ptr()
