"""Memory that a tensor describes: tensors over it that do not keep it, and whether it is still there."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def alias_of(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor over ``storage`` that lies in it as ``tensor`` lies in its own storage.

    It has the dtype, shape, strides, storage offset and the conjugate and negative bits of ``tensor``, the device of
    ``storage``, and takes no part in autograd.
    """
    alias = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    alias.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        torch._C._set_conj(alias, True)
    if tensor.is_neg():
        torch._C._set_neg(alias, True)
    return alias


def problem_of(storage: StorageWeakRef, address: int, nbytes: int) -> str | None:
    """Say what has happened to the memory of a storage since it was ``nbytes`` at ``address``; None if nothing."""
    now = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    if now is None:
        return "was freed"
    if now.nbytes() < nbytes:
        return f"was resized from {nbytes} to {now.nbytes()} bytes"
    return "was moved" if now.data_ptr() != address else None
