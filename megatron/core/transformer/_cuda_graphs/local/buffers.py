"""Static tensors of local graphs: which graph reads the output of another, and when memory can be reused.

All of this runs during capture, in the order in which the graphs will be replayed. A tensor is free once the last graph
that may read it has been captured: graphs that are captured later replay later.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..engine.memory import storage_address
from .arguments import ArgMetadata, CudagraphBufferMetadata
from .tensor_reuse_pool import TensorReusePool

# The numbers of static values and static gradients that graphs still to be captured will read. At the end of a capture
# the first is zero; so is the second, unless the graph that would read a gradient has no recorded backward pass.
fwd_buffer_reuse_ref_count = 0
bwd_buffer_reuse_ref_count = 0


class StaticBuffers:
    """Finds the static inputs of graphs and the static gradients of their outputs.

    If a graph returns a tensor that another takes, both use the first graph's output; its gradient is the output of the
    second one's backward graph. All others come from ``pool``.
    """

    def __init__(self, pool: TensorReusePool):
        self.pool = pool
        self._gradients: set[int] = set()  # addresses of tensors that were ever lent as gradients

    def let_go(self, tensor: torch.Tensor) -> None:
        """Return the memory of ``tensor`` to the pool, if it is from there."""
        self.pool.let_go(tensor)

    def inputs(self, metas: Sequence[ArgMetadata]) -> list[torch.Tensor]:
        """Return the static inputs of a graph that takes tensors like ``metas``."""
        global fwd_buffer_reuse_ref_count
        tensors = []
        for meta in metas:
            known = _metadata(meta)
            if known.fwd_cudagraph_buffer is None:
                known.fwd_cudagraph_buffer = self.pool.get(meta)
                known.capture_reuse_count = max(known.input_use_count, 1)
                fwd_buffer_reuse_ref_count += 1
            tensors.append(known.fwd_cudagraph_buffer.detach().requires_grad_(meta.requires_grad))
        return tensors

    def inputs_read(self, metas: Iterable[ArgMetadata]) -> None:
        """Release the static inputs for ``metas``, after the capture of the last graph of a runner that reads them."""
        global fwd_buffer_reuse_ref_count
        for meta in metas:
            known = _metadata(meta)
            known.capture_reuse_count -= 1
            if known.capture_reuse_count == 0 and known.fwd_cudagraph_buffer is not None:
                self.pool.let_go(known.fwd_cudagraph_buffer)
                known.fwd_cudagraph_buffer = None
                fwd_buffer_reuse_ref_count -= 1

    def lend_outputs(self, metas: Sequence[ArgMetadata], outputs: Sequence[torch.Tensor]) -> None:
        """Hold ``outputs``, described by ``metas``, and let graphs that take them read them in place."""
        global fwd_buffer_reuse_ref_count
        for meta, output in zip(metas, outputs, strict=True):
            self.pool.hold(output)
            known = _metadata(meta)
            if known.cudagraph_reuse_ref_count and known.fwd_cudagraph_buffer is None:
                self.pool.hold(output)
                known.fwd_cudagraph_buffer = output.detach()
                known.capture_reuse_count = known.cudagraph_reuse_ref_count
                fwd_buffer_reuse_ref_count += 1

    def grads_of_outputs(self, metas: Iterable[ArgMetadata]) -> list[torch.Tensor]:
        """Return the static gradients of the outputs described by ``metas``, all of which require grad."""
        grads = []
        for meta in metas:
            lent = _metadata(meta).bwd_cudagraph_buffer
            if lent is None:
                lent = self.pool.get(_without_grad(meta))
                self._gradients.add(lent.data_ptr())
            grads.append(lent)
        return grads

    def holds_inputs_only(self, tensor: torch.Tensor) -> bool:
        """Whether only inputs of replays are ever written to the address of ``tensor``, a static input."""
        return self.pool.owns(tensor) and tensor.data_ptr() not in self._gradients

    def grads_of_outputs_read(self, metas: Sequence[ArgMetadata], grads: Iterable[torch.Tensor]) -> None:
        """Release ``grads``, from ``grads_of_outputs``, after the capture of the backward graph that reads them."""
        global bwd_buffer_reuse_ref_count
        for meta, grad in zip(metas, grads, strict=True):
            known = _metadata(meta)
            if known.bwd_cudagraph_buffer is not None:
                known.bwd_cudagraph_buffer = None
                bwd_buffer_reuse_ref_count -= 1
            self.pool.let_go(grad)

    def lend_grads(self, metas: Sequence[ArgMetadata], grads: Sequence[torch.Tensor | None]) -> set[int]:
        """Hold ``grads``, which a backward graph computes, and let the graphs that return ``metas`` read them in place.

        Returns:
            The indices of the gradients that no graph reads; their last reader is not known. A gradient that is shared
            by two inputs is read in place for one only, as autograd may add to that of the other.
        """
        global bwd_buffer_reuse_ref_count
        escaping: set[int] = set()
        lent: set[int] = set()
        for index, (meta, grad) in enumerate(zip(metas, grads, strict=True)):
            if grad is None:
                continue
            self.pool.hold(grad)
            known = _metadata(meta)
            if known.is_cudagraph_output and known.bwd_cudagraph_buffer is None and storage_address(grad) not in lent:
                lent.add(storage_address(grad))
                known.bwd_cudagraph_buffer = grad
                bwd_buffer_reuse_ref_count += 1
            else:
                escaping.add(index)
        return escaping


def reset_counts() -> None:
    """Set the counts to zero, for a new recording."""
    global fwd_buffer_reuse_ref_count, bwd_buffer_reuse_ref_count
    fwd_buffer_reuse_ref_count = bwd_buffer_reuse_ref_count = 0


def _metadata(meta: ArgMetadata) -> CudagraphBufferMetadata:
    if not hasattr(meta, "cg_buffer_metadata"):
        meta.cg_buffer_metadata = CudagraphBufferMetadata()
    return meta.cg_buffer_metadata


def _without_grad(meta: ArgMetadata) -> ArgMetadata:
    grad = ArgMetadata.__new__(ArgMetadata)
    vars(grad).update(vars(meta) | {"requires_grad": False})
    return grad


@dataclass(slots=True, eq=False)
class StaticInput:
    """A static input; one object for all graphs that read it.

    Attributes:
        tensor: The static tensor, without grad.
        only_copied_to: Whether only ``put`` writes it. A tensor that several graphs of a step take is then copied once,
            unless its version changes in between.
        address, stride: Its address and strides.
    """

    tensor: torch.Tensor
    only_copied_to: bool
    address: int = 0
    stride: tuple[int, ...] = ()
    _given: tuple[weakref.ref, int] | None = None

    def __post_init__(self) -> None:
        self.address, self.stride = self.tensor.data_ptr(), self.tensor.stride()

    def forget(self) -> None:
        """Forget the last value, at the end of a step: optimizers may change tensors without changing their version."""
        self._given = None

    def put(self, given: torch.Tensor, in_use: bool) -> bool:
        """Copy ``given`` to the static tensor, unless that holds its value already.

        Args:
            given: The value.
            in_use: Whether the current value will still be read.

        Returns:
            False, with nothing copied, if that would overwrite a value in use.
        """
        here = given.data_ptr() == self.address
        if here and given.stride() == self.stride:
            return True
        version = -1 if given.is_inference() else given._version
        last = self._given
        if last is not None and last[0]() is given and last[1] == version >= 0:
            return True
        if in_use:
            return False
        self.tensor.copy_(given.clone() if here else given)
        if self.only_copied_to:
            self._given = weakref.ref(given), version
        return True
