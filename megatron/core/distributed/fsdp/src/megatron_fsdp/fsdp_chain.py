"""Consecutive FSDP units that run as one graph, with their collectives inside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch

from .bucket_places import BucketPlaces
from .fsdp_dropped_collectives import drop_collectives
from .fsdp_recorded_collectives import TO_GATHER
from .fsdp_unit import Unit
from .fsdp_unit_plan import UnitPlan
from .gradient_storages import GradientStorages
from .training_state import TrainingState

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
        self._submodules = [submodule for unit in units.values() for submodule in unit.submodules]
        groups = enumerate(self._fsdp.param_and_grad_buffer.parameter_groups)
        in_units = {bucket for bucket, group in groups if group.fsdp_unit_id is not None}
        self._holds_all_units = in_units == set(self._buckets)
        self._weights, self._grads = BucketPlaces("gather parameters to"), BucketPlaces("write gradients to")

    @contextmanager
    def recording(self, phase: Literal["forward", "backward"]) -> Iterator[None]:
        """The context in which a phase is recorded."""
        graphed, reductions = self._hooks.graphed, self._fsdp.grad_reduce_pipeline
        graphed.free_held_gradients()
        self._release()
        graphed.recorded_chain = self
        current = torch.cuda.current_stream()
        others = self._fsdp.all_gather_pipeline.ag_stream, reductions.rs_stream
        storages = self._gradient_storages()
        try:
            for stream in others:
                stream.wait_stream(current)
            if phase == "forward" and storages is not None:
                storages.leave_room()
            yield
            if phase == "backward":
                reductions.wait_for_previous_grad_reduce(0)
                self._note_addresses()
            for stream in others:
                current.wait_stream(stream)
            if phase == "backward" and storages is not None:
                storages.settle()
        except BaseException:
            recorded = torch.cuda.is_current_stream_capturing()  # such collectives never run
            drop_collectives(self._fsdp, finished=not recorded)
            raise
        finally:
            graphed.recorded_chain = None

    def _gradient_storages(self) -> GradientStorages | None:
        """The memory of the optimizer's gradients, if it can stay in that of the graph that is being recorded."""
        if not self._holds_all_units or not torch.cuda.is_current_stream_capturing():
            return None
        storages: GradientStorages | None = self._fsdp.param_and_grad_buffer.gradient_storages()
        return storages

    def _note_addresses(self) -> None:
        gathers, reductions = self._fsdp.all_gather_pipeline, self._fsdp.grad_reduce_pipeline
        dtype = reductions.buffer.mp_policy.grad_comm_dtype
        for bucket in self._buckets:
            self._weights.note(gathers.get_fsdp_buffer(bucket))
            if bucket in reductions.bucket_status:
                self._grads.note(reductions.get_fsdp_buffer(bucket), dtype)

    def before_forward(self) -> None:
        """Make sure that the double buffer is free, and where it was at capture.

        Raises:
            MovedBufferError: it is not.
        """
        self._release_double_buffer()

    def _release_double_buffer(self) -> None:
        self._release()
        self._weights.check()

    def before_backward(self) -> None:
        """The same for the backward pass, and for the gradients' double buffer.

        Raises:
            MovedBufferError: one is not free, or not where it was at capture.
        """
        reductions = self._fsdp.grad_reduce_pipeline
        groups = reductions.buffer.parameter_groups
        if any(groups[bucket].fsdp_unit_id is not None for _, _, bucket in reductions.grad_reduce_queue):
            reductions.wait_for_previous_grad_reduce(0)
        self._release_double_buffer()
        self._grads.check()

    def after_backward(self) -> None:
        """Note that the gradients of all units have been reduced, and their backward pass is over."""
        self._hooks.awaiting_gradient -= self._params
        for submodule in self._submodules:  # or the next eager pass would count as a recomputation
            submodule.__dict__["_training_state"] = TrainingState.IDLE

    def collect(self, param: torch.nn.Parameter) -> bool:
        """Whether ``param``, whose gradient is complete, is kept until ``collected``."""
        return False

    def collected(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return and forget the parameters of ``module`` that were kept."""
        return []

    def _release(self) -> None:
        gathers = self._fsdp.all_gather_pipeline
        for bucket in self._buckets:
            if gathers.bucket_status[bucket, False] not in TO_GATHER:  # prefetched by a unit outside of the chain
                gathers.release_bucket(bucket, False)
