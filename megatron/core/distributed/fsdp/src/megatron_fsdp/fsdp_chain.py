"""Consecutive FSDP units that run as one graph, with their collectives inside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from megatron.core.transformer._cuda_graphs.engine.addresses import MovedBufferError

from .fsdp_dropped_collectives import drop_collectives
from .fsdp_recorded_collectives import TO_GATHER
from .fsdp_unit import ADVICE, Unit
from .fsdp_unit_plan import UnitPlan

if TYPE_CHECKING:
    from .fsdp_hooks import FsdpHooks


class UnitChain:
    """The ``ChainOwner`` of consecutive FSDP units.

    While the chain is recorded, the units' hooks run as in training: they gather, prefetch, reduce and release, on the
    streams for that, and the graph holds it all. Only units of the chain are prefetched. A replay finds every unit of
    the chain released and leaves it so.

    Args:
        hooks: Megatron-FSDP's hooks.
        units: The units, by module, in the order of forward.
        plans: For each module what is done around its passes, nothing of it recorded.

    Attributes:
        plans: The same.
    """

    def __init__(
        self,
        hooks: "FsdpHooks",
        units: dict[torch.nn.Module, Unit],
        plans: dict[torch.nn.Module, UnitPlan],
    ):
        self.plans = plans
        self._hooks, self._fsdp = hooks, hooks.fsdp
        self._params = frozenset(param for plan in plans.values() for param in plan.written)
        self._buckets = [bucket for unit in units.values() for bucket in unit.buckets]
        self._weights: dict[int, Any] = {}  # by address: a buffer that is gathered to it
        self._grads: dict[int, Any] = {}  # by address: what fetches a bucket that is there, and what frees it

    @contextmanager
    def recording(self, phase: Literal["forward", "backward"]) -> Iterator[None]:
        """The context in which a phase is recorded."""
        graphed, reductions = self._hooks.graphed, self._fsdp.grad_reduce_pipeline
        graphed.free_held_gradients()
        self._release()
        graphed.recorded_chain = self
        current = torch.cuda.current_stream()
        others = self._fsdp.all_gather_pipeline.ag_stream, reductions.rs_stream
        try:
            for stream in others:
                stream.wait_stream(current)
            yield
            if phase == "backward":
                reductions.wait_for_previous_grad_reduce(0)
                self._note_addresses()
            for stream in others:
                current.wait_stream(stream)
        except BaseException:
            drop_collectives(self._fsdp, finished=False)  # they never run
            raise
        finally:
            graphed.recorded_chain = None

    def _note_addresses(self) -> None:
        gathers, reductions = self._fsdp.all_gather_pipeline, self._fsdp.grad_reduce_pipeline
        dtype = reductions.buffer.mp_policy.grad_comm_dtype
        for bucket in self._buckets:
            weights = gathers.get_fsdp_buffer(bucket)
            self._weights.setdefault(_address(weights, None), weights)
            if bucket in reductions.bucket_status:
                grads = reductions.get_fsdp_buffer(bucket)
                self._grads.setdefault(_address(grads, dtype), grads)

    def before_forward(self) -> None:
        """Make sure that the double buffer is free, and where it was at capture.

        Raises:
            MovedBufferError: it is not.
        """
        self._release()
        for address, buffer in self._weights.items():
            _check(address, _address(buffer, None), "gather parameters to")

    def before_backward(self) -> None:
        """The same for the backward pass, and for the gradients' double buffer.

        Raises:
            MovedBufferError: one is not free, or not where it was at capture.
        """
        reductions = self._fsdp.grad_reduce_pipeline
        groups = reductions.buffer.parameter_groups
        if any(groups[bucket].fsdp_unit_id is not None for _, _, bucket in reductions.grad_reduce_queue):
            reductions.wait_for_previous_grad_reduce(0)
        self.before_forward()
        dtype = reductions.buffer.mp_policy.grad_comm_dtype
        for address, buffer in self._grads.items():
            _check(address, _address(buffer, dtype), "write gradients to")

    def after_backward(self) -> None:
        """Note that the gradients of all units have been reduced."""
        self._hooks.awaiting_gradient -= self._params

    def _release(self) -> None:
        gathers = self._fsdp.all_gather_pipeline
        for bucket in self._buckets:
            if gathers.bucket_status[bucket, False] not in TO_GATHER:  # prefetched by a unit outside of the chain
                gathers.release_bucket(bucket, False)


def _address(buffer: Any, dtype: torch.dtype | None) -> int:
    """Where ``buffer`` would put a bucket now."""
    address: int = buffer.fetch_bucket(dtype=dtype).data.data_ptr()
    buffer.free_bucket_storage()
    return address


def _check(captured: int, now: int, what: str) -> None:
    if now != captured:
        raise MovedBufferError(f"CUDA graphs {what} {captured:#x}; now it would be {now:#x}. {ADVICE}")
