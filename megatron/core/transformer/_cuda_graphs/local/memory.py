"""Memory of local graphs: the memory pool, and static tensors that graphs reuse over time.

Static tensors are acquired during capture, in replay order. A tensor can be reused once the last graph that reads it
has been captured, because graphs that are captured later also replay later.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..engine.graph import record_nothing
from ..engine.memory import storage_address, version_of
from ..engine.plan import BufferPool, Lease
from .arguments import ArgMetadata, metadata_of

# An empty graph per pool, which uses no memory.
_placeholders: dict[tuple, torch.cuda.CUDAGraph] = {}


def hold_pool(pool: tuple) -> None:
    """Keep ``pool`` usable until ``release_pools``. Call this before the first capture into the pool.

    torch cannot capture into a pool after all of its graphs have been freed: assertions of its device and
    pinned-memory allocators fail. An empty graph keeps the pool in use even while no model has graphs.
    """
    if pool not in _placeholders:
        _placeholders[pool] = record_nothing(torch.cuda.CUDAGraph, pool)


def release_pools() -> None:
    """Release all pools. torch frees their memory once graphs and tensors no longer use it."""
    while _placeholders:
        _placeholders.popitem()[1].reset()


class TensorReusePool:
    """Allocates reusable static tensors, and keeps all of them alive.

    A released tensor is reused for the next request with the same shape, strides, dtype and device. The caller must
    ensure that only replays of the next user read or write it after its release.
    """

    def __init__(self) -> None:
        self._buffers = BufferPool[torch.Tensor]()
        self._leases: dict[int, Lease[torch.Tensor]] = {}  # by address

    @property
    def tensor_strong_refs(self) -> list[torch.Tensor]:
        """Return all tensors of the pool."""
        return [lease.buffers for lease in self._leases.values()]

    @property
    def tensor_strong_refs_dataptrs(self) -> set[int]:
        """Return the addresses of all tensors of the pool."""
        return set(self._leases)

    @property
    def pool(self) -> list[torch.Tensor]:
        """Return the free tensors."""
        return self._buffers.free()

    def insert(self, tensor: torch.Tensor) -> None:
        """Remove a reference to ``tensor``; without references, the tensor is free again.

        Raises:
            ValueError: The tensor is not from this pool, or is already free.
        """
        if not self.owns(tensor):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} does not belong to this pool: insert only tensors from get()"
            )
        self.release(tensor)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` has the address of a tensor from this pool."""
        return tensor.data_ptr() in self._leases

    def get(self, meta: ArgMetadata) -> torch.Tensor:
        """Return a tensor that matches ``meta``: the one that has been free longest, or a new one."""
        key = meta.shape, meta.stride, meta.dtype, meta.device
        lease = self._buffers.acquire(key, lambda: meta.zeros_like().detach())
        if lease.buffers.numel():  # empty tensors have no distinct address
            self._leases[lease.buffers.data_ptr()] = lease
        return lease.buffers.detach().requires_grad_(meta.requires_grad)

    def hold(self, tensor: torch.Tensor) -> None:
        """Add a reference to the memory of ``tensor``, if it is from this pool; raise ValueError if it is free."""
        if (lease := self._leases.get(storage_address(tensor))) is not None:
            self._buffers.retain(lease)

    def release(self, tensor: torch.Tensor) -> None:
        """Remove a reference to the memory of ``tensor``, if it is from this pool; raise ValueError if it is free."""
        if (lease := self._leases.get(storage_address(tensor))) is not None:
            self._buffers.release(lease)


@dataclass(slots=True, eq=False)
class StaticInput:
    """A static input, shared by all graphs that read it.

    Attributes:
        tensor: The static tensor, without grad.
        only_copied_to: Whether only ``put`` writes the tensor. If so, a value passed to several graphs is copied once.
        given: The last copied tensor and its version; None if the static tensor may have a different value.
    """

    tensor: torch.Tensor
    only_copied_to: bool
    given: tuple[weakref.ref, int] | None = None

    def put(self, given: torch.Tensor, in_use: Callable[[], bool]) -> bool:
        """Copy ``given`` to the static tensor, unless it already has that value.

        Args:
            in_use: Returns whether a backward pass still reads the current value.

        Returns:
            False if nothing was copied because the copy would overwrite a value in use, True otherwise.
        """
        here = given.data_ptr() == self.tensor.data_ptr()
        if here and given.stride() == self.tensor.stride():
            return True
        version = version_of(given)
        last = self.given
        if last is not None and last[0]() is given and last[1] == version >= 0:
            return True
        if in_use():
            return False
        self.tensor.copy_(given.clone() if here else given)
        if self.only_copied_to:
            self.given = weakref.ref(given), version
        return True


class StaticBuffers:
    """Manages static inputs of graphs and static gradients of their outputs.

    A graph that takes the output of a previous graph reads it in place, and its backward graph writes the gradient to
    the address that the previous graph's backward reads. All other static tensors come from ``pool``.
    """

    def __init__(self) -> None:
        self.pool = TensorReusePool()
        self._gradients: set[int] = set()  # addresses of all tensors ever used as gradients
        self._inputs: dict[int, StaticInput] = {}  # by address

    def inputs(self, metas: Sequence[ArgMetadata]) -> list[torch.Tensor]:
        """Return the static inputs of a graph whose input tensors match ``metas``."""
        tensors = []
        for meta in metas:
            known = metadata_of(meta)
            if known.fwd_cudagraph_buffer is None:
                known.fwd_cudagraph_buffer = self.pool.get(meta)
                known.capture_reuse_count = max(known.input_use_count, 1)
            tensors.append(known.fwd_cudagraph_buffer.detach().requires_grad_(meta.requires_grad))
        return tensors

    def inputs_read(self, metas: Iterable[ArgMetadata]) -> None:
        """Release the static inputs for ``metas``; call this after the last graph of a runner is captured."""
        for known in map(metadata_of, metas):
            known.capture_reuse_count -= 1
            if known.capture_reuse_count == 0 and known.fwd_cudagraph_buffer is not None:
                self.pool.release(known.fwd_cudagraph_buffer)
                known.fwd_cudagraph_buffer = None

    def lend_outputs(self, metas: Sequence[ArgMetadata], outputs: Sequence[torch.Tensor]) -> None:
        """Hold ``outputs``, described by ``metas``, for later graphs that read them in place."""
        for known, output in zip(map(metadata_of, metas), outputs, strict=True):
            self.pool.hold(output)
            if known.cudagraph_reuse_ref_count and known.fwd_cudagraph_buffer is None:
                self.pool.hold(output)
                known.fwd_cudagraph_buffer = output.detach()
                known.capture_reuse_count = known.cudagraph_reuse_ref_count

    def grads_of_outputs(self, metas: Iterable[ArgMetadata]) -> list[torch.Tensor]:
        """Return the static gradients of the outputs described by ``metas``. All outputs must require grad."""
        grads = []
        for meta in metas:
            grad = metadata_of(meta).bwd_cudagraph_buffer
            if grad is None:
                grad = self.pool.get(meta).detach()
                self._gradients.add(grad.data_ptr())
            grads.append(grad)
        return grads

    def grads_of_outputs_read(self, metas: Sequence[ArgMetadata], grads: Iterable[torch.Tensor]) -> None:
        """Release ``grads``, a result of ``grads_of_outputs``. Call this after capturing the graph that reads them."""
        for known, grad in zip(map(metadata_of, metas), grads, strict=True):
            known.bwd_cudagraph_buffer = None
            self.pool.release(grad)

    def lend_grads(self, metas: Sequence[ArgMetadata], grads: Sequence[torch.Tensor | None]) -> set[int]:
        """Hold ``grads``, the input gradients of a backward graph, for backward graphs that will read them in place.

        Returns:
            Indices of the gradients that no graph reads in place. If two inputs share a gradient tensor, it is
            read in place for only one input, because autograd may add to the gradient of the other input.
        """
        escaping: set[int] = set()
        lent: set[int] = set()
        for index, (known, grad) in enumerate(zip(map(metadata_of, metas), grads, strict=True)):
            if grad is None:
                continue
            self.pool.hold(grad)
            if known.is_cudagraph_output and known.bwd_cudagraph_buffer is None and storage_address(grad) not in lent:
                lent.add(storage_address(grad))
                known.bwd_cudagraph_buffer = grad
            else:
                escaping.add(index)
        return escaping

    def input_of(self, tensor: torch.Tensor) -> StaticInput:
        """Return the shared ``StaticInput`` for ``tensor``."""
        address = tensor.data_ptr()
        only_copied_to = self.pool.owns(tensor) and address not in self._gradients
        return self._inputs.setdefault(address, StaticInput(tensor.detach(), only_copied_to))

    def forget_values(self) -> None:
        """Forget which values were copied, because optimizers may change a tensor without changing its version."""
        for static in self._inputs.values():
            static.given = None
