"""Tensors over memory that another tensor describes."""

import torch


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
