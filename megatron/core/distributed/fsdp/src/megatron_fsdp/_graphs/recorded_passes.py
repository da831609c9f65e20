"""Record the passes of a whole model, including its collectives, in one graph per direction."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_global_memory_buffer
from megatron.core.transformer._cuda_graphs.engine.captured import GraphOwner
from megatron.core.transformer._cuda_graphs.snapshot import Aspect, Snapshot, addresses

from ..param_and_grad_buffer import TO_GATHER
from . import collectives
from .pipelines import ADVICE, Direction, TrainingState, drop_collectives, prepared, release_all, set_training_state
from .runners import EagerRunner


class RecordedPasses(GraphOwner):
    """Owns the graphs of a whole model.

    During recording, the hooks of all modules and parameters run as in training: they gather, prefetch, reduce and
    release on their usual streams, and the graphs contain all of this work. Every unit is released before and after a
    replay. Prefetches do not cross the boundary of the graphs: with the double buffer, megatron-core prefetches only
    from unit to unit.

    Parameters outside of units (embedding, final norm and output layer) stay gathered for a step, so they are gathered
    before a replay.

    Args:
        graphs: The ``FsdpGraphs`` that owns this object.
        begin: Called with the name of each part of the capture: ``before forward``, then ``forward`` or ``backward``
            for each pass.
        alone: Whether the pool of the graphs serves this model only, so that the optimizer's gradients can share memory
            with its activations: replays of another chunk would overwrite them.

    Attributes:
        replayed: Whether the last forward pass with gradients was a replay.
        repeated: The graph of each optimizer's clipping; freed with the graphs, before its communicators are destroyed.
    """

    _last: Direction = "backward"  # the last phase that is recorded

    def __init__(self, graphs: Any, begin: Callable[[str], object], *, alone: bool):
        self._graphs, self._fsdp, self._alone = graphs, graphs.fsdp, alone
        self._backward, self._gradients = graphs.backward, graphs.gradients
        self._begin = begin
        runners = list(graphs.units.values())
        self._first: dict[Direction, EagerRunner] = {"forward": runners[0], "backward": runners[-1]}
        groups = self._fsdp.param_and_grad_buffer.parameter_groups
        self._buckets = [bucket for runner in runners for bucket in runner.buckets]
        self._outside = [bucket for bucket, group in enumerate(groups) if group.fsdp_unit_id is None]
        self._params = frozenset(param for group in groups for param in group.params)
        self._weights = self._grads = Snapshot(ADVICE)
        self._reduced: dict[tuple[int, ...], torch.cuda.Event] = {}  # see ``GradReducePipeline.marked``
        self.replayed = False
        self.repeated: dict[Any, Any] = {}

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Context manager for warm-up and capture: prepares the model, and restores it even after an exception.

        No parameters are gathered and no collectives are in flight before or after.
        """
        fsdp = self._fsdp
        microbatches = fsdp.microbatch_count
        self._begin("before forward")
        with prepared(fsdp):
            fsdp.all_gather_pipeline.gather_across_replicas()
            self._graphs.whole_passes = self
            try:
                self.gather()
                yield
                if self._outside:
                    release_all(fsdp)
                    collectives.record(fsdp, self._outside, reductions=False)
                reductions = fsdp.grad_reduce_pipeline
                reductions.order = [*dict.fromkeys((*self._reduced, *reductions.order))]
            except BaseException:
                fsdp.param_and_grad_buffer.leave_graphs()
                self.forget()
                self._backward.close()
                raise
            finally:
                fsdp.microbatch_count = microbatches

    @contextmanager
    def running(self, phase: Direction) -> Iterator[None]:
        """Context manager for one pass of warm-up or recording; on exit, all its work has joined the current stream."""
        self._begin(phase)
        self._release()
        gathers, reductions = self._fsdp.all_gather_pipeline, self._fsdp.grad_reduce_pipeline
        index, current = self._fsdp.dist_index, torch.cuda.current_stream()
        others = gathers.ag_stream, reductions.rs_stream
        backward, records = phase == "backward", torch.cuda.is_current_stream_capturing()
        optimizer_grads = self._fsdp.param_and_grad_buffer.optimizer_grads
        shares_memory = records and self._alone and self._last == "backward" and optimizer_grads is not None
        with self._graphs.capturing({}):
            try:
                for stream in others:
                    stream.wait_stream(current)
                if shares_memory and not backward:
                    optimizer_grads.storages.reserve()
                if index.use_hybrid_fsdp and records:
                    reductions.marked = self._reduced
                    gathers.recording = not backward and index.hsdp_outer_dp_shard
                if backward:
                    self._backward.start(caller_ends_it=True)  # releases all units
                gathers.recycle_unused_buckets()
                self.gather_first_unit(phase)
                yield
                if backward:
                    self._backward.finish_units()
                    self._gradients.handle_rest(self._params)
                    self._backward.close()
                gathers.settle()
                if backward:
                    reductions.wait_for_previous_grad_reduce(0)
                if phase == self._last:
                    self._note_addresses()
                for stream in others:
                    current.wait_stream(stream)
                if shares_memory and backward:
                    optimizer_grads.storages.adopt()
            except BaseException:
                # Collectives recorded in a graph never run.
                drop_collectives(self._fsdp, finished=not torch.cuda.is_current_stream_capturing())
                raise
            finally:
                reductions.marked, gathers.recording = None, False

    def _note_addresses(self) -> None:
        gathers, reductions = self._fsdp.all_gather_pipeline, self._fsdp.grad_reduce_pipeline
        weights = {f"the parameters of bucket {bucket}": gathers.get_fsdp_buffer(bucket) for bucket in self._buckets}
        outside = [param for bucket in self._outside for param in gathers.buffer.parameter_groups[bucket].params]
        names = [self._fsdp.param_to_name[param] for param in outside]
        self._weights = Snapshot(ADVICE, addresses(names, outside), *places(weights, None))
        if self._last == "backward":
            with_grads = reductions.with_grads([*self._buckets, *self._outside])
            grads = {f"the gradients of bucket {bucket}": reductions.get_fsdp_buffer(bucket) for bucket in with_grads}
            self._grads = Snapshot(ADVICE, *places(grads, reductions.buffer.mp_policy.grad_comm_dtype))

    def gather_first_unit(self, phase: Direction) -> None:
        """Start gathering the first unit of a pass before its hook runs, without prefetching.

        In backward, the hook would gather the prefetched second unit first, because megatron-core gathers in bucket
        order.
        """
        self._fsdp.all_gather_and_wait_parameters_ready(
            self._first[phase].params, prefetch=False, wait_bucket_ready=False, bwd=phase == "backward"
        )

    def start_gather(self) -> None:
        """Start gathering the parameters outside of units, unless they are already gathered."""
        gathers = self._fsdp.all_gather_pipeline
        gathers.gather_across_replicas(replayed=self._buckets)  # graphs wait for these, the current stream for the rest
        for bucket in self._outside:
            gathers.start_gather(bucket)

    def gather(self) -> None:
        """Gather the parameters outside of units, unless they are already gathered, and wait for them."""
        self.start_gather()
        for bucket in self._outside:
            self._fsdp.all_gather_pipeline.wait_bucket_ready(bucket, False)

    def _release(self) -> None:
        gathers = self._fsdp.all_gather_pipeline
        for bucket in self._buckets:
            if gathers.bucket_status[bucket, False] not in TO_GATHER:  # gathered outside of the graphs
                gathers.release_bucket(bucket, False)

    def before_eager_forward(self) -> None:
        """Start the same all-gathers as ranks that replay the pass."""
        self.replayed = False
        self.start_gather()

    def before_forward(self) -> None:
        """Gather the parameters outside of units, and check that they and the double buffer have not moved.

        Gradients that the optimizer still needs are preserved.

        Raises:
            ChangedSinceCaptureError: An address changed since capture, or the double buffer is in use.
        """
        self.gather()
        self._release()
        self._weights.check()
        optimizer_grads = self._fsdp.param_and_grad_buffer.optimizer_grads
        if optimizer_grads is not None and not optimizer_grads.in_place and self._last == "backward":
            optimizer_grads.storages.preserve()
        self.replayed = True

    def before_backward(self) -> None:
        """Check the double buffers of parameters and gradients.

        Raises:
            ChangedSinceCaptureError: An address changed since capture, or a double buffer is in use.
            RuntimeError: This backward pass also covers an eager forward pass of the same units.
        """
        self._backward.start(replayed=True)
        self._backward.begin(self._graphs.units, self)
        reductions = self._fsdp.grad_reduce_pipeline
        reductions.replayed = self._reduced
        groups = reductions.buffer.parameter_groups
        if any(groups[bucket].fsdp_unit_id is not None for _, _, bucket in reductions.grad_reduce_queue):
            reductions.wait_for_previous_grad_reduce(0)
        self._release()
        self._weights.check()
        self._grads.check()

    def after_backward(self) -> None:
        """Stop awaiting the graphs' gradients, if any, and set the units to idle."""
        if self._gradients.awaited:
            self._gradients.awaited.difference_update(self._params)
            for unit in self._graphs.units.values():  # so that the next pass is no recomputation
                set_training_state(unit.submodules, TrainingState.IDLE)

    def forget(self) -> None:
        """Run the units eagerly from now on, and free the related graphs."""
        for work in self.repeated.values():
            work.reset()
        self.repeated.clear()
        if self._graphs.whole_passes is self:
            self._graphs.whole_passes = None
            collectives.forget(self._fsdp, self._outside)


class EvaluatedModel(RecordedPasses):
    """Owns the graph of a model's forward pass in evaluation.

    Gradients, and parameters outside of units, keep their values and addresses: a later backward pass may read them.
    """

    _last = "forward"

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Context manager for warm-up and capture: on entry and on exit, all units are released."""
        self._begin("before forward")
        with prepared(self._fsdp):
            self.gather()
            yield


def places(buffers: dict[str, Any], dtype: torch.dtype | None) -> list[Aspect]:
    """Return snapshot aspects that compare the addresses at which ``buffers`` allocate buckets.

    An allocator reuses these addresses if none of its buckets is in use and its memory was not reallocated.

    Args:
        buffers: The buffers by name.
        dtype: The dtype of the buckets; None for each buffer's own.
    """
    whole, pooled = {}, {}
    for name, buffer in reversed(buffers.items()):
        if not buffer.is_data_distributed and dtype in (None, buffer.dtype):
            whole[name] = buffer  # its buckets are views of its own data
        else:
            pooled[_address_in(buffer, dtype)] = name, buffer  # units share the double buffer
    keys_of = {memory.data_ptr(): key for key, memory in get_global_memory_buffer().buffer.items()}
    keys = [keys_of.get(address) for address in pooled]
    pools = {buffer.temporary_bucket_allocator for _, buffer in pooled.values()}

    fixed, in_use = None not in keys and all(hasattr(pool, "idle_buffer") for pool in pools), attrgetter("using_buffer")

    def glance() -> Any:
        if not fixed or any(map(in_use, pools)):
            return math.nan  # never equal to a snapshot
        memory = get_global_memory_buffer().buffer
        return [memory[key].data_ptr() for key in keys if key in memory] + [len(pool.idle_buffer) for pool in pools]

    names = [name for name, _ in pooled.values()]
    return [
        addresses(whole, lambda: [buffer.data for buffer in whole.values()]),
        Aspect(names, lambda: [_address_in(buffer, dtype) for _, buffer in pooled.values()], glance, show=hex),
    ]


def _address_in(buffer: Any, dtype: torch.dtype | None) -> int:
    """Return the address at which ``buffer`` would allocate a bucket now."""
    address: int = buffer.fetch_bucket(dtype=dtype).data.data_ptr()
    buffer.free_bucket_storage()
    return address
