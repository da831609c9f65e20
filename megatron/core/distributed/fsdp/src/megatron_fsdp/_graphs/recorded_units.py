"""FSDP units whose passes are recorded in one graph for each direction, with their collectives inside it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..gradient_storages import GradientStorages
from ..training_state import TrainingState
from .backward_pass import BackwardPass
from .bucket_places import BucketPlaces
from .dropped_collectives import drop_collectives, take_back_unlaunched
from .gradients import Gradients
from .graphed_units import GraphedUnits
from .recorded_collectives import TO_GATHER
from .unit import Unit
from .unit_plan import Direction, UnitPlan


class RecordedUnits:
    """The ``PassOwner`` of FSDP units.

    While the graphs are recorded, the hooks of all modules and parameters run as in training: they gather, prefetch,
    reduce and release, on the streams for that, and the graphs hold it all. A replay finds every unit released and
    leaves it so.

    Args:
        fsdp: The wrapper.
        graphed: Its units that run as CUDA graphs.
        backward: Its backward pass.
        gradients: Its gradients.
        units: The units, by module, in the order of forward.
        begin: Called with what begins: ``before forward``, then each pass that is warmed up or recorded.

    Attributes:
        plans: For each module that must gather otherwise than in eager training how it does.
    """

    def __init__(
        self,
        fsdp: Any,
        graphed: GraphedUnits,
        backward: BackwardPass,
        gradients: Gradients,
        units: dict[torch.nn.Module, Unit],
        begin: Callable[[str], object],
    ):
        self.plans: dict[torch.nn.Module, UnitPlan] = {}
        self._fsdp, self._graphed, self._backward, self._gradients = fsdp, graphed, backward, gradients
        self._begin: Callable[[str], object] | None = begin  # until the capture is over
        self._units = units
        self._buckets = [bucket for unit in units.values() for bucket in unit.buckets]
        groups = enumerate(self._fsdp.param_and_grad_buffer.parameter_groups)
        in_units = {bucket for bucket, group in groups if group.fsdp_unit_id is not None}
        self._holds_all_units = in_units == set(self._buckets)
        self._weights, self._grads = BucketPlaces("gather parameters to"), BucketPlaces("write gradients to")
        self._module_of = {param: module for module, unit in units.items() for param in unit.params}
        self._collected: dict[torch.nn.Module, list[torch.nn.Parameter]] = {module: [] for module in units}

    # ------------------------------------------------------------------------------------------------------- capture

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Keep the model ready for warm-up and capture, and as it was afterwards, also after an exception.

        Nothing is gathered, reduced or in flight at either end.
        """
        fsdp = self._fsdp
        microbatches = fsdp.microbatch_count
        assert self._begin is not None
        self._begin("before forward")
        with self._graphed.prepared():
            try:
                with self._gathered_outside():
                    yield
                self._graphed.recorded.append(self)
            except BaseException:
                take_back_unlaunched(fsdp)
                self._backward.drop()
                raise
            finally:
                fsdp.microbatch_count = microbatches
                self._begin = None

    @contextmanager
    def _gathered_outside(self) -> Iterator[None]:
        """Keep gathered what the graphs read and do not gather."""
        yield

    @contextmanager
    def running(self, phase: Direction) -> Iterator[None]:
        """The context in which a phase is warmed up or recorded."""
        assert self._begin is not None
        self._begin(phase)
        with self._recording(phase):
            if phase == "backward":
                self._backward.start(caller_ends_it=True)
            yield
            if phase == "backward":
                self._end_backward()
            self._graphed.settle()

    def _end_backward(self) -> None:
        self._gradients.handle_rest(self._module_of)
        self._backward.close()

    @contextmanager
    def _recording(self, phase: Direction) -> Iterator[None]:
        graphed, reductions = self._graphed, self._fsdp.grad_reduce_pipeline
        graphed.free_held_gradients()
        self._release()
        graphed.recording = self
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
            graphed.recording = None

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

    def collect(self, param: torch.nn.Parameter) -> bool:
        """Keep the parameter of a unit, whose gradient is complete, until ``collected``: all are copied at once.

        Returns False if the caller must handle it now.
        """
        module = self._module_of.get(param)
        if module is not None:
            self._collected[module].append(param)
        return module is not None

    def collected(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return and forget the parameters of ``module`` that ``collect`` kept."""
        collected, self._collected[module] = self._collected[module], []
        return collected

    def captured_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return with their names the shards of weights and gradients, and where buckets are while they are in use."""
        reductions = self._fsdp.grad_reduce_pipeline
        dtype = reductions.buffer.mp_policy.grad_comm_dtype
        groups = reductions.buffer.parameter_groups
        for bucket in self._read_buckets():
            group = groups[bucket]
            of = f"of bucket {bucket} ({self._fsdp.param_to_name[group.params[0]]}, ...)"
            yield f"the weights' shard {of}", group.model_weight_buffer.data
            if group.main_grad_buffer:
                yield f"the main gradients' shard {of}", group.main_grad_buffer.data
                yield f"the gradients {of}", group.main_grad_buffer.fetch_bucket(dtype=dtype).data
                group.main_grad_buffer.free_bucket_storage()

    def _read_buckets(self) -> list[int]:
        return self._buckets

    # ------------------------------------------------------------------------------------------------------- replays

    def before_forward(self) -> None:
        """Make sure that the double buffer is free, and where it was at capture.

        Raises:
            MovedBufferError: it is not.
        """
        self._release()
        self._weights.check()

    def before_eager_forward(self) -> None:
        """Called right before a forward pass with gradients that runs eagerly, where other ranks may replay theirs."""

    def before_backward(self) -> None:
        """Make sure that the double buffers of parameters and gradients are free, and where they were at capture.

        Raises:
            MovedBufferError: one is not.
            RuntimeError: a forward pass of the same units that ran eagerly is in this backward pass, too.
        """
        self._graphed.begin_replayed_backward(self._units)
        reductions = self._fsdp.grad_reduce_pipeline
        groups = reductions.buffer.parameter_groups
        if any(groups[bucket].fsdp_unit_id is not None for _, _, bucket in reductions.grad_reduce_queue):
            reductions.wait_for_previous_grad_reduce(0)
        self._release()
        self._weights.check()
        self._grads.check()

    def after_backward(self) -> None:
        """Note that the gradients of all units have been reduced, and their backward pass is over."""
        self._gradients.awaited.difference_update(self._module_of)
        for unit in self._units.values():  # or the next eager pass would count as a recomputation
            unit.set_training_state(TrainingState.IDLE)

    def forget(self) -> None:
        """Note that there are no graphs any more."""
        if self in self._graphed.recorded:
            self._graphed.recorded.remove(self)

    def _release(self) -> None:
        gathers = self._fsdp.all_gather_pipeline
        for bucket in self._buckets:
            if gathers.bucket_status[bucket, False] not in TO_GATHER:  # somebody gathered it meanwhile
                gathers.release_bucket(bucket, False)


class RecordedLayers(RecordedUnits):
    """Consecutive layers of a model, whose other modules run eagerly around the replays.

    In the graphs no other unit is prefetched, and outside of them none of these: under the double buffer megatron-core
    prefetches units for units only.
    """

    def __init__(self, fsdp: Any, graphed: GraphedUnits, *args: Any):
        super().__init__(fsdp, graphed, *args)
        self.plans = graphed.plans_to_gather(self._units)
