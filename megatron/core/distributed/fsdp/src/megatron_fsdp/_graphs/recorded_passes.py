"""FSDP units whose passes are recorded in one graph for each direction, with their collectives inside it."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_global_memory_buffer
from megatron.core.transformer._cuda_graphs.engine.captured import GraphOwner
from megatron.core.transformer._cuda_graphs.snapshot import Aspect, Snapshot, addresses

from ..optimizer_gradients import GradientStorages
from . import collectives
from .collectives import TO_GATHER
from .pipelines import drop_collectives, prepared, prepared_for_evaluation, release_all, take_back_unlaunched
from .unit import ADVICE, Direction, TrainingState, Unit


class RecordedPasses(GraphOwner):
    """Owns the graphs of consecutive FSDP units, or of a whole model.

    While the graphs are recorded, the hooks of all modules and parameters run as in training: they gather, prefetch,
    reduce and release, on the streams for that, and the graphs hold it all. A replay finds every unit released and
    leaves it so. No other unit is prefetched in the graphs, and none of these outside of them: under the double buffer
    megatron-core prefetches units for units only.

    Parameters of a whole model that are in no unit (of embedding, final norm and output layer) stay gathered for a
    step, so they are gathered before a replay.

    Args:
        graphs: The ``FsdpGraphs`` that owns it.
        units: The units, by module, in the order of forward.
        begin: Called with what begins: ``before forward``, then each ``forward`` and ``backward`` pass.
        whole: Whether they are all of the model.

    Attributes:
        replayed: Whether the last forward pass with gradients was a replay.
        on_forget: Called once when the graphs are freed, by those who own graphs beside them.
    """

    _last: Direction = "backward"  # of the phases that are recorded

    def __init__(self, graphs: Any, units: Mapping[torch.nn.Module, Unit], begin: Callable[[str], object], whole: bool):
        self._graphs, self._fsdp = graphs, graphs.fsdp
        self._backward, self._gradients = graphs.backward, graphs.gradients
        self._begin, self.whole = begin, whole
        self.units = units
        modules = list(units)
        self._first: dict[Direction, torch.nn.Module] = {"forward": modules[0], "backward": modules[-1]}
        groups = self._fsdp.param_and_grad_buffer.parameter_groups
        self._buckets = [bucket for unit in units.values() for bucket in unit.buckets]
        in_units = {bucket for bucket, group in enumerate(groups) if group.fsdp_unit_id is not None}
        self._holds_all_units = in_units == set(self._buckets)
        self._outside = [bucket for bucket in range(len(groups)) if bucket not in in_units] if whole else []
        self._all_buckets = [*self._buckets, *self._outside]  # whose shards the graphs read or write
        self._params_outside = [param for bucket in self._outside for param in groups[bucket].params]
        self._params = frozenset(param for bucket in self._all_buckets for param in groups[bucket].params)
        self._weights = self._grads = self._in_place = Snapshot(ADVICE)  # the last of parameters outside of units
        self._reduced: dict[tuple[int, ...], torch.cuda.Event] = {}  # see ``GradReducePipeline.marked``
        self.replayed = False
        self.on_forget: list[Callable[[], None]] = []

    # ------------------------------------------------------------------------------------------------------- capture

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Keep the model ready for warm-up and capture, and as it was afterwards, also after an exception.

        Nothing is gathered, reduced or in flight at either end.
        """
        fsdp = self._fsdp
        microbatches = fsdp.microbatch_count
        self._begin("before forward")
        with prepared(fsdp):
            if fsdp.dist_index.hsdp_outer_dp_shard:
                fsdp.all_gather_pipeline.gather_between_instances()
            self._graphs.passes = self
            try:
                self.gather()
                yield
                if self._outside:
                    release_all(fsdp)
                    collectives.record(fsdp, self._outside, reductions=False)
                reductions = fsdp.grad_reduce_pipeline
                reductions.order = [*dict.fromkeys((*self._reduced, *reductions.order))]
            except BaseException:
                take_back_unlaunched(fsdp)
                self.forget()
                self._backward.drop()
                raise
            finally:
                fsdp.microbatch_count = microbatches

    @contextmanager
    def running(self, phase: Direction) -> Iterator[None]:
        """The context in which a phase is warmed up or recorded. At its end all work has joined its stream."""
        self._begin(phase)
        gathers = self._fsdp.all_gather_pipeline
        with self._graphs.capturing({}), self._recording(phase):
            if phase == "backward":
                self._backward.start(caller_ends_it=True)  # releases all units: `only` must not be in effect yet
            with gathers.only(self._all_buckets):
                self.gather_first_unit(phase)
                yield
                if phase == "backward":
                    self._gradients.handle_rest(self._params)
                    self._backward.close()
                gathers.settle()

    @contextmanager
    def _recording(self, phase: Direction) -> Iterator[None]:
        reductions = self._fsdp.grad_reduce_pipeline
        self._release()
        current = torch.cuda.current_stream()
        gathers = self._fsdp.all_gather_pipeline
        others = gathers.ag_stream, reductions.rs_stream
        storages = self._gradient_storages()
        try:
            for stream in others:
                stream.wait_stream(current)
            if phase == "forward" and storages is not None:
                storages.reserve()
            if self._fsdp.dist_index.use_hybrid_fsdp and torch.cuda.is_current_stream_capturing():
                reductions.marked = self._reduced
                gathers.recording = phase == "forward" and self._fsdp.dist_index.hsdp_outer_dp_shard
            yield
            if phase == "backward":
                reductions.wait_for_previous_grad_reduce(0)
            if phase == self._last:
                self._note_addresses()
            for stream in others:
                current.wait_stream(stream)
            if phase == "backward" and storages is not None:
                storages.adopt()
        except BaseException:
            recorded = torch.cuda.is_current_stream_capturing()  # such collectives never run
            drop_collectives(self._fsdp, finished=not recorded)
            raise
        finally:
            reductions.marked, gathers.recording = None, False

    def _gradient_storages(self) -> GradientStorages | None:
        """Return the memory of the optimizer's gradients, if it can stay in that of the graph under capture."""
        holds = self._holds_all_units and torch.cuda.is_current_stream_capturing()
        return self._fsdp.param_and_grad_buffer.gradient_storages() if holds else None

    def _note_addresses(self) -> None:
        gathers, reductions = self._fsdp.all_gather_pipeline, self._fsdp.grad_reduce_pipeline
        weights = {f"the parameters of bucket {bucket}": gathers.get_fsdp_buffer(bucket) for bucket in self._buckets}
        self._weights = Snapshot(ADVICE, places(weights, None))
        if self._last == "backward":
            with_grads = [bucket for bucket in self._all_buckets if bucket in reductions.bucket_status]
            grads = {f"the gradients of bucket {bucket}": reductions.get_fsdp_buffer(bucket) for bucket in with_grads}
            self._grads = Snapshot(ADVICE, places(grads, reductions.buffer.mp_policy.grad_comm_dtype))
            names = [self._fsdp.param_to_name[param] for param in self._params_outside]
            self._in_place = Snapshot(ADVICE, addresses(names, self._params_outside))

    # ------------------------------------------------------------------------------------------------------- gathers

    @contextmanager
    def gathering(self, module: torch.nn.Module, direction: Direction) -> Iterator[None]:
        """The context in which an eager pass gathers ``module`` in the order of other ranks, which replay it."""
        if self.whole or module not in self.units:
            yield
            return
        if module is self._first[direction]:
            self._release()
            self.gather_first_unit(direction)
        with self._fsdp.all_gather_pipeline.only(self._buckets):
            yield

    def gather_first_unit(self, phase: Direction) -> None:
        """Start to gather the first unit of a phase ahead of its own hook, which would gather the next one first."""
        params = self.units[self._first[phase]].params
        backward = phase == "backward"
        self._fsdp.all_gather_and_wait_parameters_ready(params, prefetch=False, wait_bucket_ready=False, bwd=backward)

    def start_gather(self) -> None:
        """Start to gather the parameters outside of units that are not gathered."""
        gathers = self._fsdp.all_gather_pipeline
        if self._fsdp.dist_index.hsdp_outer_dp_shard:  # graphs wait for their units, the current stream for the others
            gathers.gather_between_instances(replayed=self._buckets)
        for bucket in self._outside:
            if gathers.bucket_status[bucket, False] in TO_GATHER:
                recorded = gathers.recorded.get(bucket)
                if recorded is None or not recorded.launch():
                    gathers.all_gather_params(self._params_outside)
                    return

    def gather(self) -> None:
        """Gather the parameters outside of units that are not gathered, and wait for them."""
        self.start_gather()
        for bucket in self._outside:
            self._fsdp.all_gather_pipeline.wait_bucket_ready(bucket, False)

    def gather_in_place(self) -> None:
        """Gather parameters outside of units to where they were at capture.

        Raises:
            ChangedSinceCaptureError: one is elsewhere.
        """
        if self._outside:
            self.gather()
            self._in_place.check()
        else:
            self.start_gather()

    def _release(self) -> None:
        gathers = self._fsdp.all_gather_pipeline
        for bucket in self._buckets:
            if gathers.bucket_status[bucket, False] not in TO_GATHER:  # somebody gathered it meanwhile
                gathers.release_bucket(bucket, False)

    # ------------------------------------------------------------------------------------------------------- replays

    def before_eager_forward(self) -> None:
        """Start to gather what a replay needs gathered, as other ranks do."""
        self.replayed = False
        self.start_gather()

    def before_forward(self) -> None:
        """Gather what is outside of units; check that the double buffer is free, and where it was at capture.

        Raises:
            ChangedSinceCaptureError: it is not.
        """
        self.gather_in_place()
        self._release()
        self._weights.check()
        self.replayed = True

    def before_backward(self) -> None:
        """Check that the double buffers of parameters and gradients are free, and where they were at capture.

        Raises:
            ChangedSinceCaptureError: one is not.
            RuntimeError: a forward pass of the same units that ran eagerly is in this backward pass, too.
        """
        if self.whole:
            self._backward.start(replayed=True)
        self._backward.begin(self.units, self)
        reductions = self._fsdp.grad_reduce_pipeline
        reductions.replayed = self._reduced
        groups = reductions.buffer.parameter_groups
        if any(groups[bucket].fsdp_unit_id is not None for _, _, bucket in reductions.grad_reduce_queue):
            reductions.wait_for_previous_grad_reduce(0)
        self._release()
        self._weights.check()
        self._grads.check()

    def after_backward(self) -> None:
        """Note that all gradients have been reduced, if the hooks expect any, and the units' backward pass is over."""
        if self._gradients.awaited:
            self._gradients.awaited.difference_update(self._params)
            for unit in self.units.values():  # or the next eager pass would count as a recomputation
                unit.set_training_state(TrainingState.IDLE)

    def forget(self) -> None:
        """Let the units run eagerly from now on, and free what was recorded beside their graphs."""
        for free in self.on_forget:
            free()
        self.on_forget.clear()
        if self._graphs.passes is self:
            self._graphs.passes = None
            collectives.forget(self._fsdp, self._outside)


class EvaluatedModel(RecordedPasses):
    """Owns the graph of the forward pass of a model in evaluation.

    Gradients and gathered parameters outside of units stay as they are: a backward pass that is still to come may read
    them.
    """

    _last = "forward"

    def __init__(self, training: RecordedPasses, begin: Callable[[str], object]):
        super().__init__(training._graphs, training.units, begin, whole=True)
        self._training = training

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Keep the model ready for warm-up and capture. No unit is gathered at either end."""
        self._begin("before forward")
        with prepared_for_evaluation(self._fsdp):
            self._training.gather()
            yield

    def _gradient_storages(self) -> None:
        """None: the optimizer's gradients stay where they are."""

    def before_eager_forward(self) -> None:
        self._training.start_gather()

    def before_forward(self) -> None:
        self._training.gather_in_place()
        self._release()
        self._weights.check()


def places(buffers: dict[str, Any], dtype: torch.dtype | None) -> Aspect:
    """Compare where ``buffers`` put buckets of ``dtype`` (their own if None) while none of these is in use.

    Allocators may put a bucket elsewhere while others are in use. If all memory is where it was, and all of it is idle,
    then every bucket goes where it went.

    Args:
        buffers: The buffers, by what messages call them.
    """
    distinct = {_address_in(buffer, dtype): (name, buffer) for name, buffer in reversed(buffers.items())}
    named = {memory.data_ptr(): name for name, memory in get_global_memory_buffer().buffer.items()}
    undivided = [
        buffer for _, buffer in distinct.values() if not buffer.is_data_distributed and dtype in (None, buffer.dtype)
    ]  # whose buckets are parts of their own data
    others = {address: buffer for address, (_, buffer) in distinct.items() if buffer not in undivided}
    pools = {buffer.temporary_bucket_allocator for buffer in others.values()}
    keys = [named.get(address) for address in others]
    fixed = None not in keys and all(hasattr(pool, "idle_buffer") for pool in pools)
    in_use, idle = attrgetter("using_buffer"), attrgetter("idle_buffer")

    def glance() -> Any:
        if not fixed or any(map(in_use, pools)):
            return math.nan  # never what it was
        memory = get_global_memory_buffer().buffer
        in_pools = [memory[key].data_ptr() for key in keys if key in memory]
        return [*in_pools, *map(len, map(idle, pools)), *[buffer.data.data_ptr() for buffer in undivided]]

    names, checked = zip(*distinct.values(), strict=True) if distinct else ((), ())
    return Aspect(names, lambda: [_address_in(buffer, dtype) for buffer in checked], glance, show=hex)


def _address_in(buffer: Any, dtype: torch.dtype | None) -> int:
    """Return where ``buffer`` would put a bucket now."""
    address: int = buffer.fetch_bucket(dtype=dtype).data.data_ptr()
    buffer.free_bucket_storage()
    return address
