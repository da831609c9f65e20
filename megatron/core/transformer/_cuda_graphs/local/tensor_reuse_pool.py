"""Static tensors that one local graph after another uses."""

import torch

from ..engine.buffers import BufferPool, Lease
from ..engine.memory import storage_address
from .arguments import ArgMetadata


class TensorReusePool:
    """Lends tensors of its own as static inputs and gradients, again and again, and keeps all of them.

    A tensor that was given back serves the next request for one of the same shape, strides, dtype and device. Giving a
    tensor back asserts that only replays of its next borrower still read or write it.

    Attributes:
        tensor_strong_refs: Every tensor that the pool has made.
        tensor_strong_refs_dataptrs: Their addresses.
    """

    def __init__(self) -> None:
        self.tensor_strong_refs: list[torch.Tensor] = []
        self.tensor_strong_refs_dataptrs: set[int] = set()
        self._buffers = BufferPool[torch.Tensor]()
        self._leases: dict[int, Lease[torch.Tensor]] = {}  # by address

    @property
    def pool(self) -> list[torch.Tensor]:
        """The tensors that are free."""
        return self._buffers.free()

    def insert(self, tensor: torch.Tensor) -> None:
        """Give ``tensor`` back: its memory is free once all who hold it have done so.

        Raises:
            ValueError: it is not from this pool, or was given back already.
        """
        if not self.owns(tensor):
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is given back to a pool that did not lend it")
        lease = self._leases[tensor.data_ptr()]
        if not lease.holders:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is given back twice")
        self._buffers.release(lease)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` starts where one that this pool has made does."""
        return tensor.data_ptr() in self.tensor_strong_refs_dataptrs

    def get(self, meta: ArgMetadata) -> torch.Tensor:
        """Lend a tensor that is as ``meta`` says: a free one, the one that is free for longest first, or a new one."""
        key = meta.shape, meta.stride, meta.dtype, meta.device
        lease = self._buffers.acquire(key, lambda: meta.zeros_like().detach())
        tensor = lease.buffers
        if tensor.numel() and not self.owns(tensor):  # an empty one has no address that would tell it from others
            self.tensor_strong_refs.append(tensor)
            self.tensor_strong_refs_dataptrs.add(tensor.data_ptr())
            self._leases[tensor.data_ptr()] = lease
        return tensor.detach().requires_grad_(meta.requires_grad)

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep the memory of ``tensor``, any view of one from this pool, until it is given back once more.

        Raises:
            ValueError: the memory is free already.
        """
        lease = self._leases.get(storage_address(tensor))
        if lease is not None:
            self._buffers.retain(lease)

    def let_go(self, tensor: torch.Tensor) -> None:
        """Give back the memory of ``tensor``, if it is a view of one from this pool.

        Raises:
            ValueError: the memory is free already.
        """
        lease = self._leases.get(storage_address(tensor))
        if lease is not None:
            self._buffers.release(lease)
