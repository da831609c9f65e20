"""A model whose forward and backward passes run as one graph each, with their collectives inside."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch

from megatron.core.transformer._cuda_graphs.engine.addresses import AddressGuard
from megatron_fsdp_cuda_graphs.overlay import upstream

from .fsdp_chain import UnitChain, address_in
from .fsdp_unit import ADVICE, Unit
from .fsdp_unit_plan import GroupGather

if TYPE_CHECKING:
    from .fsdp_hooks import FsdpHooks

TrainingState = upstream("megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp").TrainingState


class WholeModel(UnitChain):
    """The ``PassOwner`` of a model.

    The hooks of all modules and parameters run in warm-up and capture as in training, from the beginning of the
    backward pass to the last reduction, and the graphs hold what they enqueue. Parameters outside of units (of
    embedding, final norm and output layer) stay gathered for a whole step, so they are gathered before a replay.

    Args:
        hooks: Megatron-FSDP's hooks.
        units: All units, by module.
    """

    def __init__(self, hooks: "FsdpHooks", units: dict[torch.nn.Module, Unit]):
        super().__init__(hooks, units, {})
        self._units = list(units.values())
        groups = self._fsdp.param_and_grad_buffer.parameter_groups
        self._outside = [bucket for bucket, group in enumerate(groups) if group.fsdp_unit_id is None]
        self._params_outside = [param for bucket in self._outside for param in groups[bucket].params]
        self._gathers: Sequence[GroupGather] = ()
        self._guard: AddressGuard | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Keep the model ready for warm-up and capture, and as it was afterwards, also after an exception.

        Nothing is gathered, reduced or in flight at either end.
        """
        hooks, fsdp = self._hooks, self._fsdp
        microbatches = fsdp.microbatch_count
        with hooks.graphed.prepared():
            self._gathers = hooks.graphed.gathers_of(self._outside, recorded=False)
            try:
                self.gather()
                yield
                hooks.graphed.release_all()
                self._gathers = hooks.graphed.gathers_of(self._outside, recorded=True)
            except BaseException:
                hooks.forget_backward()
                raise
            finally:
                fsdp.microbatch_count = microbatches

    @contextmanager
    def running(self, phase: Literal["forward", "backward"]) -> Iterator[None]:
        """The context in which a phase is warmed up or recorded."""
        with self.recording(phase):
            if phase == "backward":
                self._hooks.start_backward(None, skip_backward_hook=True)
            yield
            if phase == "backward":
                self._hooks.finish_backward()
            self._hooks.graphed.settle()

    def _note_addresses(self) -> None:
        super()._note_addresses()
        reductions, name = self._fsdp.grad_reduce_pipeline, self._fsdp.param_to_name
        dtype = reductions.buffer.mp_policy.grad_comm_dtype
        for bucket in self._outside:
            if bucket in reductions.bucket_status:
                grads = reductions.get_fsdp_buffer(bucket)
                self._grads.setdefault(address_in(grads, dtype), grads)
        params = self._params_outside
        self._guard = AddressGuard(lambda: params, lambda i: name[params[i]], ADVICE)

    def gather(self) -> None:
        """Gather the parameters outside of units, unless they are gathered, and wait for them."""
        gathers = self._fsdp.all_gather_pipeline
        for group in self._gathers:
            group.launch()
        for bucket in self._outside:
            gathers.wait_bucket_ready(bucket, False)

    def before_forward(self) -> None:
        """Gather parameters outside of units, and make sure that all buffers are where they were at capture.

        Raises:
            MovedBufferError: one is not.
        """
        self.gather()
        super().before_forward()
        if self._guard is not None:
            self._guard.check()

    def after_backward(self) -> None:
        """Note that all gradients have been reduced."""
        self._hooks.awaiting_gradient.clear()
        for unit in self._units:
            unit.set_training_state(TrainingState.IDLE)

    def forget(self) -> None:
        """Free the graphs of all-gathers."""
        self._hooks.graphed.forget_gathers(self._outside)
        self._gathers = ()
