"""Static tensors that local graphs use in turn."""

import torch

from ..engine.buffers import BufferPool, Lease
from ..engine.memory import storage_address
from .arguments import ArgMetadata


class TensorReusePool:
    """Lends static inputs and gradients, and keeps all of them alive.

    A returned tensor serves the next request for the same shape, strides, dtype and device. Returning a tensor asserts
    that from then on only replays of its next borrower read or write it.

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
        """Return ``tensor`` to the pool; its memory is free after the last holder has done so.

        Raises:
            ValueError: it is not from this pool, or was returned already.
        """
        if not self.owns(tensor):
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is given back to a pool that did not lend it")
        lease = self._leases[tensor.data_ptr()]
        if not lease.holders:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is given back twice")
        self._buffers.release(lease)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has the address of one of this pool's tensors."""
        return tensor.data_ptr() in self.tensor_strong_refs_dataptrs

    def get(self, meta: ArgMetadata) -> torch.Tensor:
        """Lend a tensor described by ``meta``: the one that has been free for longest, or a new one."""
        key = meta.shape, meta.stride, meta.dtype, meta.device
        lease = self._buffers.acquire(key, lambda: meta.zeros_like().detach())
        tensor = lease.buffers
        if tensor.numel() and not self.owns(tensor):  # empty tensors have no distinct address
            self.tensor_strong_refs.append(tensor)
            self.tensor_strong_refs_dataptrs.add(tensor.data_ptr())
            self._leases[tensor.data_ptr()] = lease
        return tensor.detach().requires_grad_(meta.requires_grad)

    def hold(self, tensor: torch.Tensor) -> None:
        """Add a holder of the memory of ``tensor``, if it is a view of a tensor of this pool.

        Raises:
            ValueError: the memory is free already.
        """
        lease = self._leases.get(storage_address(tensor))
        if lease is not None:
            self._buffers.retain(lease)

    def let_go(self, tensor: torch.Tensor) -> None:
        """Remove a holder of the memory of ``tensor``, if it is a view of a tensor of this pool.

        Raises:
            ValueError: the memory is free already.
        """
        lease = self._leases.get(storage_address(tensor))
        if lease is not None:
            self._buffers.release(lease)
