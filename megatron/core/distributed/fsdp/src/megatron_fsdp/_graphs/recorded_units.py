"""FSDP units whose passes are recorded in one graph for each direction, with their collectives inside it."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_global_memory_buffer
from megatron.core.transformer._cuda_graphs.engine.addresses import MovedBufferError
from megatron.core.transformer._cuda_graphs.engine.captured import GraphOwner

from ..optimizer_gradients import GradientStorages
from ..planned_copies import Placement
from ..training_state import TrainingState
from .context import Context
from .pipelines import drop_collectives, prepared, take_back_unlaunched
from .recorded_collectives import TO_GATHER
from .runners import Recorded
from .unit import ADVICE, Direction, Unit
from .unit_plan import UnitPlan


class RecordedUnits(GraphOwner):
    """Owns the graphs of FSDP units.

    While the graphs are recorded, the hooks of all modules and parameters run as in training: they gather, prefetch,
    reduce and release, on the streams for that, and the graphs hold it all. A replay finds every unit released and
    leaves it so.

    Args:
        units: The units, by module, in the order of forward.
        begin: Called with what begins: ``before forward``, then each ``forward`` and ``backward`` pass.
        plans: How those units gather that must do it otherwise than in eager training.

    Attributes:
        runners: How passes of the units are recorded.
    """

    _last: Direction = "backward"  # of the phases that are recorded

    def __init__(
        self,
        context: Context,
        units: Mapping[torch.nn.Module, Unit],
        begin: Callable[[str], object],
        plans: Mapping[torch.nn.Module, UnitPlan],
    ):
        ordered = [*units]
        first: dict[Direction, list[torch.nn.Module]] = {"forward": ordered[:1], "backward": ordered[-1:]}
        self.runners = {}
        for module in units:
            before = {direction: self._release for direction in first if module in first[direction]}
            self.runners[module] = Recorded(context, module, plans.get(module), before)
        self._context, self._fsdp = context, context.fsdp
        self._backward, self._gradients = context.backward, context.gradients
        self._begin = begin
        self._units = units
        self._buckets = [bucket for unit in units.values() for bucket in unit.buckets]
        self._all_buckets = self._buckets  # whose shards the graphs read or write
        groups = enumerate(self._fsdp.param_and_grad_buffer.parameter_groups)
        in_units = {bucket for bucket, group in groups if group.fsdp_unit_id is not None}
        self._holds_all_units = in_units == set(self._buckets)
        self._weights, self._grads = BucketPlaces("gather parameters to"), BucketPlaces("write gradients to")
        self._params = frozenset(param for unit in units.values() for param in unit.params)
        self._reduced: dict[tuple[int, ...], torch.cuda.Event] = {}  # see ``GradReducePipeline.marked``

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
            try:
                with self._gathered_outside():
                    yield
                self._succeeded()
                reductions = fsdp.grad_reduce_pipeline
                reductions.order = [*dict.fromkeys((*self._reduced, *reductions.order))]
            except BaseException:
                take_back_unlaunched(fsdp)
                self._backward.drop()
                raise
            finally:
                fsdp.microbatch_count = microbatches

    def _succeeded(self) -> None:
        """Let the registry know of the graphs."""
        self._context.registry.graphed.update(self.runners)

    @contextmanager
    def _gathered_outside(self) -> Iterator[None]:
        """Keep gathered what the graphs read and do not gather."""
        yield

    @contextmanager
    def running(self, phase: Direction) -> Iterator[None]:
        self._begin(phase)
        with self._context.registry.capturing(self.runners), self._recording(phase):
            if phase == "backward":
                self._backward.start(caller_ends_it=True)
            yield
            if phase == "backward":
                self._end_backward()
            self._fsdp.all_gather_pipeline.settle()

    def _end_backward(self) -> None:
        self._gradients.handle_rest(self._params)
        self._backward.close()

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
        """The memory of the optimizer's gradients, if it can stay in that of the graph that is being recorded."""
        holds = self._holds_all_units and torch.cuda.is_current_stream_capturing()
        return self._fsdp.param_and_grad_buffer.gradient_storages() if holds else None

    def _note_addresses(self) -> None:
        self._note_weights()
        reductions = self._fsdp.grad_reduce_pipeline
        dtype = reductions.buffer.mp_policy.grad_comm_dtype
        for bucket in self._all_buckets:
            if bucket in reductions.bucket_status:
                self._grads.note(reductions.get_fsdp_buffer(bucket), dtype)

    def _note_weights(self) -> None:
        for bucket in self._buckets:
            self._weights.note(self._fsdp.all_gather_pipeline.get_fsdp_buffer(bucket))

    def before_forward(self) -> None:
        """Make sure that the double buffer is free, and where it was at capture.

        Raises:
            MovedBufferError: it is not.
        """
        self.gather_between_instances()
        self._release()
        self._weights.check()

    def gather_between_instances(self) -> None:
        """Gather parameters between instances of hybrid sharding, if these shard them, once in a step.

        Graphs wait for those of the units, and the current stream for the others.
        """
        if self._fsdp.dist_index.hsdp_outer_dp_shard:
            self._fsdp.all_gather_pipeline.gather_between_instances(replayed=self._buckets)

    def before_backward(self) -> None:
        """Make sure that the double buffers of parameters and gradients are free, and where they were at capture.

        Raises:
            MovedBufferError: one is not.
            RuntimeError: a forward pass of the same units that ran eagerly is in this backward pass, too.
        """
        self._backward.begin(self._units, self)
        reductions = self._fsdp.grad_reduce_pipeline
        reductions.replayed = self._reduced
        groups = reductions.buffer.parameter_groups
        if any(groups[bucket].fsdp_unit_id is not None for _, _, bucket in reductions.grad_reduce_queue):
            reductions.wait_for_previous_grad_reduce(0)
        self._release()
        self._weights.check()
        self._grads.check()

    def after_backward(self) -> None:
        """Note that the gradients of all units have been reduced, and their backward pass is over."""
        self._gradients.awaited.difference_update(self._params)
        for unit in self._units.values():  # or the next eager pass would count as a recomputation
            unit.set_training_state(TrainingState.IDLE)

    def forget(self) -> None:
        graphed = self._context.registry.graphed
        for module in [module for module, runner in self.runners.items() if graphed.get(module) is runner]:
            del graphed[module]

    def _release(self) -> None:
        gathers = self._fsdp.all_gather_pipeline
        for bucket in self._buckets:
            if gathers.bucket_status[bucket, False] not in TO_GATHER:  # somebody gathered it meanwhile
                gathers.release_bucket(bucket, False)


class BucketPlaces:
    """The places of buckets that graphs use while none of them is in use.

    Args:
        use: What the graphs do there, for errors: ``write gradients to``.
    """

    def __init__(self, use: str):
        self._use = use
        self._buffers: dict[int, tuple[Any, torch.dtype | None]] = {}  # by address
        self._fixed: dict[int, Hashable] | None = {}  # by address the memory's name; None if some has none
        # Allocators, which may put a bucket elsewhere while others are in use, and how many places each has.
        self._pools: dict[Any, int] = {}
        self._undivided: Placement | None = None  # buffers whose buckets are parts of their own data

    def note(self, buffer: Any, dtype: torch.dtype | None = None) -> None:
        """Note where ``buffer`` puts a bucket of ``dtype`` (its own if None) now."""
        address = _address_in(buffer, dtype)
        if address in self._buffers:
            return
        self._buffers[address] = buffer, dtype
        if not buffer.is_data_distributed and dtype in (None, buffer.dtype):
            self._undivided = self._undivided or Placement(())
            self._undivided.add(buffer)
            return
        named = get_global_memory_buffer().buffer.items()
        name = next((name for name, memory in named if memory.data_ptr() == address), None)
        allocator = buffer.temporary_bucket_allocator
        if name is None or not hasattr(allocator, "idle_buffer"):
            self._fixed = None
        elif self._fixed is not None:
            self._fixed[address] = name
            self._pools[allocator] = len(allocator.idle_buffer) + len(allocator.using_buffer)

    def check(self) -> None:
        """Make sure that buckets still go where they went. None of them is in use, before and after.

        Raises:
            MovedBufferError: one does not.
        """
        if self._nothing_moved():
            return
        for address, (buffer, dtype) in self._buffers.items():
            now = _address_in(buffer, dtype)
            if now != address:
                raise MovedBufferError(f"CUDA graphs {self._use} {address:#x}; now it would be {now:#x}. {ADVICE}")

    def _nothing_moved(self) -> bool:
        """Whether all memory is where it was, and all of it idle: then every bucket goes where it went."""
        if self._fixed is None or (self._undivided is not None and not self._undivided.unchanged()):
            return False
        if [len(pool.idle_buffer) for pool in self._pools] != [*self._pools.values()]:
            return False
        memory = get_global_memory_buffer().buffer
        return [memory[name].data_ptr() for name in self._fixed.values() if name in memory] == [*self._fixed]


def _address_in(buffer: Any, dtype: torch.dtype | None) -> int:
    """Where ``buffer`` would put a bucket now."""
    address: int = buffer.fetch_bucket(dtype=dtype).data.data_ptr()
    buffer.free_bucket_storage()
    return address
