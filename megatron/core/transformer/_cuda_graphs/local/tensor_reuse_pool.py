"""Static tensors that one graph after another uses."""

import torch

from .arguments import ArgMetadata


class TensorReusePool:
    """Lends tensors of its own as static inputs and gradients, again and again, and keeps all of them.

    What was given back serves the next that asks for a tensor of the same shape, strides, dtype and device. Who gives a
    tensor back says that no replay before those of the next borrower reads it, or writes it, any more.

    Attributes:
        tensor_strong_refs: Every tensor that the pool has made.
        tensor_strong_refs_dataptrs: Their addresses.
        pool: Those that are free.
    """

    def __init__(self) -> None:
        self.tensor_strong_refs: list[torch.Tensor] = []
        self.tensor_strong_refs_dataptrs: set[int] = set()
        self.pool: list[torch.Tensor] = []

    def insert(self, tensor: torch.Tensor) -> None:
        """Give ``tensor`` back.

        Raises:
            ValueError: it is not from this pool, or was given back already.
        """
        if not self.owns(tensor):
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is given back to a pool that did not lend it")
        if any(free.data_ptr() == tensor.data_ptr() for free in self.pool):
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is given back twice")
        self.pool.append(tensor.detach())

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` starts where one that this pool has made does."""
        return tensor.data_ptr() in self.tensor_strong_refs_dataptrs

    def get(self, meta: ArgMetadata) -> torch.Tensor:
        """Lend a tensor that is as ``meta`` says: a free one, the one that is free for longest first, or a new one."""
        for index, free in enumerate(self.pool):
            if (free.shape, free.stride(), free.dtype, free.device) == (
                meta.shape,
                meta.stride,
                meta.dtype,
                meta.device,
            ):
                return self.pool.pop(index).detach().requires_grad_(meta.requires_grad)
        tensor = meta.zeros_like().detach()
        if tensor.numel():  # an empty one has no address that would tell it from others
            self.tensor_strong_refs.append(tensor)
            self.tensor_strong_refs_dataptrs.add(tensor.data_ptr())
        return tensor.detach().requires_grad_(meta.requires_grad)
