"""Static tensors of local graphs: which graph reads what another wrote, and when memory may serve others.

Everything here happens while graphs are captured, in the order in which they will be replayed. A tensor is free once
the last graph that may read it has been captured: what is captured later replays later.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..engine.memory import storage_address
from .arguments import ArgMetadata, CudagraphBufferMetadata
from .tensor_reuse_pool import TensorReusePool

# How many static values, and static gradients, wait at this moment for graphs that are still to be captured. At the end
# of a capture the first is zero; so is the second, unless what was recorded has no backward pass for a graph that
# another's gradient waits for.
fwd_buffer_reuse_ref_count = 0
bwd_buffer_reuse_ref_count = 0


class StaticBuffers:
    """Finds the static inputs of graphs and the static gradients of their outputs.

    A tensor that a graph returns and another takes is where the first graph puts it; its gradient is where the backward
    graph of the second puts it. Everything else comes from ``pool``.
    """

    def __init__(self, pool: TensorReusePool):
        self.pool = pool
        self._gradients: set[int] = set()  # addresses of what was ever lent as a gradient

    def let_go(self, tensor: torch.Tensor) -> None:
        """Give the memory of ``tensor`` back to the pool, if it is from there."""
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
        """Say that the last graph that reads the static inputs for ``metas`` has been captured."""
        global fwd_buffer_reuse_ref_count
        for meta in metas:
            known = _metadata(meta)
            known.capture_reuse_count -= 1
            if known.capture_reuse_count == 0 and known.fwd_cudagraph_buffer is not None:
                self.pool.let_go(known.fwd_cudagraph_buffer)
                known.fwd_cudagraph_buffer = None
                fwd_buffer_reuse_ref_count -= 1

    def lend_outputs(self, metas: Sequence[ArgMetadata], outputs: Sequence[torch.Tensor]) -> None:
        """Let graphs to come read ``outputs``, which are like ``metas``, and hold them."""
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
        """Return the static gradients of outputs like ``metas``, those that require grad."""
        grads = []
        for meta in metas:
            lent = _metadata(meta).bwd_cudagraph_buffer
            if lent is None:
                lent = self.pool.get(_without_grad(meta))
                self._gradients.add(lent.data_ptr())
            grads.append(lent)
        return grads

    def holds_inputs_only(self, tensor: torch.Tensor) -> bool:
        """Whether nothing but inputs of replays is ever put where ``tensor``, a static input, starts."""
        return self.pool.owns(tensor) and tensor.data_ptr() not in self._gradients

    def grads_of_outputs_read(self, metas: Sequence[ArgMetadata], grads: Iterable[torch.Tensor]) -> None:
        """Say that the backward graph that reads ``grads``, from ``grads_of_outputs``, has been captured."""
        global bwd_buffer_reuse_ref_count
        for meta, grad in zip(metas, grads, strict=True):
            known = _metadata(meta)
            if known.bwd_cudagraph_buffer is not None:
                known.bwd_cudagraph_buffer = None
                bwd_buffer_reuse_ref_count -= 1
            self.pool.let_go(grad)

    def lend_grads(self, metas: Sequence[ArgMetadata], grads: Sequence[torch.Tensor | None]) -> set[int]:
        """Let the graphs that return ``metas`` read ``grads``, which a backward graph computes, and hold these.

        Returns:
            The indices of those that no graph reads: of these nobody knows when they have been read. One gradient of
            two inputs is lent once: what autograd adds to it for the other would be read by both.
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
    """Count from zero again, after a capture that failed or graphs that were deleted."""
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
    """Memory where graphs read one of their inputs; one object for all graphs that read it.

    Attributes:
        tensor: The static tensor, without grad.
        only_copied_to: Whether nothing but ``put`` writes it. Then a tensor that several graphs of a step take is
            copied once, unless it is changed in between in a way that autograd notices.
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
        """At the end of a step: optimizers change parameters in ways that their version does not tell."""
        self._given = None

    def put(self, given: torch.Tensor, in_use: bool) -> bool:
        """Let the memory hold the value of ``given``.

        Args:
            given: The value; nothing is copied if it is there already.
            in_use: Whether the value that is there will still be read.

        Returns:
            False if that value would have to be overwritten: then nothing is done.
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
