"""A model whose forward and backward passes run as one graph each, with their collectives inside."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch

from megatron.core.transformer._cuda_graphs.engine.addresses import AddressGuard
from megatron.core.transformer._cuda_graphs.engine.repeated_work import RepeatedWork

from .fsdp_chain import UnitChain
from .fsdp_dropped_collectives import take_back_unlaunched
from .fsdp_unit import ADVICE, Unit
from .fsdp_unit_plan import GroupGather
from .training_state import TrainingState

if TYPE_CHECKING:
    from .fsdp_hooks import FsdpHooks


class WholeModel(UnitChain):
    """The ``PassOwner`` of a model.

    The hooks of all modules and parameters run in warm-up and capture as in training, from the beginning of the
    backward pass to the last reduction, and the graphs hold what they enqueue. Parameters outside of units (of
    embedding, final norm and output layer) stay gathered for a whole step, so they are gathered before a replay.

    Args:
        hooks: Megatron-FSDP's hooks.
        units: All units, by module.
        begin: Called with what begins: ``before forward``, then each pass that is warmed up or recorded.

    Attributes:
        clipping: The optimizer's norm and clipping of the gradients, which are where the backward graph left them.
    """

    def __init__(self, hooks: "FsdpHooks", units: dict[torch.nn.Module, Unit], begin: Callable[[str], object]):
        super().__init__(hooks, units, {})
        self._begin: Callable[[str], object] | None = begin  # until the capture is over
        self._units = list(units.values())
        groups = self._fsdp.param_and_grad_buffer.parameter_groups
        self._outside = [bucket for bucket, group in enumerate(groups) if group.fsdp_unit_id is None]
        self._params_outside = [param for bucket in self._outside for param in groups[bucket].params]
        self._gathers: Sequence[GroupGather] = ()
        self._guard: AddressGuard | None = None
        self.clipping = RepeatedWork("The norm of gradients and their clipping")
        self._module_of = {param: module for module, unit in units.items() for param in unit.params}
        self._collected: dict[torch.nn.Module, list[torch.nn.Parameter]] = {module: [] for module in units}

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Keep the model ready for warm-up and capture, and as it was afterwards, also after an exception.

        Nothing is gathered, reduced or in flight at either end.
        """
        hooks, fsdp = self._hooks, self._fsdp
        microbatches = fsdp.microbatch_count
        assert self._begin is not None
        self._begin("before forward")
        with hooks.graphed.prepared():
            self._gathers = hooks.graphed.gathers_of(self._outside, recorded=False)
            try:
                self.gather()
                yield
                hooks.graphed.release_all()
                self._gathers = hooks.graphed.gathers_of(self._outside, recorded=True)
                hooks.model_passes = self
            except BaseException:
                take_back_unlaunched(fsdp)
                hooks.forget_backward()
                raise
            finally:
                fsdp.microbatch_count = microbatches
                self._begin = None

    @contextmanager
    def running(self, phase: Literal["forward", "backward"]) -> Iterator[None]:
        """The context in which a phase is warmed up or recorded."""
        backward = phase == "backward"
        assert self._begin is not None
        self._begin(phase)
        with self.recording(phase):
            if backward:
                self._hooks.start_backward(None, skip_backward_hook=True)
            self.gather_first_unit(phase)
            yield
            if backward:
                self._hooks.finish_backward()
            self._hooks.graphed.settle()

    def gather_first_unit(self, phase: Literal["forward", "backward"]) -> None:
        """Start to gather the first unit of a phase ahead of its own hook: beside what runs before the unit.

        Its hook would gather the unit after it first.
        """
        backward = phase == "backward"
        self._fsdp.all_gather_and_wait_parameters_ready(
            self._units[-1 if backward else 0].params, prefetch=False, wait_bucket_ready=False, bwd=backward
        )

    def _note_addresses(self) -> None:
        super()._note_addresses()
        reductions, name = self._fsdp.grad_reduce_pipeline, self._fsdp.param_to_name
        dtype = reductions.buffer.mp_policy.grad_comm_dtype
        for bucket in self._outside:
            if bucket in reductions.bucket_status:
                self._grads.note(reductions.get_fsdp_buffer(bucket), dtype)
        params = self._params_outside
        self._guard = AddressGuard(lambda: params, lambda i: name[params[i]], ADVICE)

    def collect(self, param: torch.nn.Parameter) -> bool:
        """Keep the parameter of a unit, whose gradient is complete, until ``collected``: all are copied at once."""
        module = self._module_of.get(param)
        if module is not None:
            self._collected[module].append(param)
        return module is not None

    def collected(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return and forget the parameters of ``module`` that ``collect`` kept."""
        collected, self._collected[module] = self._collected[module], []
        return collected

    def start_gather(self) -> None:
        """Start to gather the parameters outside of units, unless they are gathered."""
        for group in self._gathers:
            group.launch()

    def gather(self) -> None:
        """Gather the parameters outside of units, unless they are gathered, and wait for them."""
        self.start_gather()
        gathers = self._fsdp.all_gather_pipeline
        for bucket in self._outside:
            gathers.wait_bucket_ready(bucket, False)

    def before_eager_forward(self) -> None:
        """Called right before a forward pass with gradients that runs eagerly, where other ranks may replay theirs."""
        self._hooks.forward_is_replayed(False)
        self.start_gather()

    def before_forward(self) -> None:
        """Gather parameters outside of units, and make sure that all buffers are where they were at capture.

        Raises:
            MovedBufferError: one is not.
        """
        self.gather()
        super().before_forward()
        if self._guard is not None:
            self._guard.check()
        self._hooks.forward_is_replayed(True)

    def before_backward(self) -> None:
        """Open the backward pass, and make sure that all buffers are free, and where they were at capture.

        Raises:
            MovedBufferError: one is not.
        """
        self._hooks.start_backward(None, replayed=True)
        super().before_backward()

    def captured_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return with their names the shards of weights and gradients, and where buckets are while they are in use."""
        reductions = self._fsdp.grad_reduce_pipeline
        dtype = reductions.buffer.mp_policy.grad_comm_dtype
        for bucket, group in enumerate(reductions.buffer.parameter_groups):
            of = f"of bucket {bucket} ({self._fsdp.param_to_name[group.params[0]]}, ...)"
            yield f"the weights' shard {of}", group.model_weight_buffer.data
            if group.main_grad_buffer:
                yield f"the main gradients' shard {of}", group.main_grad_buffer.data
                yield f"the gradients {of}", group.main_grad_buffer.fetch_bucket(dtype=dtype).data
                group.main_grad_buffer.free_bucket_storage()

    def after_backward(self) -> None:
        """Note that all gradients have been reduced, if the hooks expect any."""
        if self._hooks.awaiting_gradient:
            self._hooks.awaiting_gradient.clear()
            for unit in self._units:
                unit.set_training_state(TrainingState.IDLE)

    def forget(self) -> None:
        """Free the other graphs: the model runs eagerly from now on."""
        self.clipping.reset()
        if self._hooks.model_passes is self:
            self._hooks.model_passes = None
        self._hooks.graphed.forget_gathers(self._outside)
        self._gathers = ()
