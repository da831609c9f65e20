"""All-gathers and reductions recorded as separate CUDA graphs.

With the double buffer, every pass gathers a unit's parameters and reduces its gradients at the same addresses. A replay
is a single launch, while an eager collective costs the host a walk through the buckets and several NCCL calls.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from megatron.core.transformer._cuda_graphs.engine.graph import Capture
from megatron.core.transformer._cuda_graphs.snapshot import Aspect, Snapshot

from ..param_and_grad_buffer import TO_GATHER, BucketStatus
from .pipelines import ADVICE


class RecordedCollective:
    """A collective on a communication stream, recorded in a graph.

    All ranks must launch recorded and eager collectives in the same order. Free the graph before the communicator: NCCL
    keeps a communicator alive as long as a graph contains its work.

    Args:
        run: Enqueues the work on the current stream, or on streams that join it.
    """

    def __init__(self, capture: Capture, stream: torch.cuda.Stream, run: Callable[[], Any]):
        self._stream, self._device = stream, stream.device_index
        self._graph = capture.new_graph()
        self._ready, self._done = torch.cuda.Event(), torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), capture.recording(self._graph):
            run()

    def _replay(self) -> None:
        """Replay the graph after the work enqueued so far on the current stream."""
        # Without the device argument, looking up the current stream is several times slower.
        stream, current = self._stream, torch.cuda.current_stream(self._device)
        self._ready.record(current)
        stream.wait_event(self._ready)
        torch.cuda.set_stream(stream)
        try:
            self._graph.replay()
        finally:
            torch.cuda.set_stream(current)
        self._done.record(stream)

    def wait(self) -> None:
        """Make the current stream wait for the last launch."""
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def reset(self) -> None:
        """Free the graph."""
        self._graph.reset()


class RecordedGather(RecordedCollective):
    """The all-gather of one group of parameter buckets.

    Args:
        gathers: The all-gather pipeline; it must not be using ``buckets``.
        buckets: The indices of the buckets, all from the same unit and process group.
    """

    def __init__(self, capture: Capture, gathers: Any, buckets: Sequence[int]):
        self._gathers = gathers
        groups = gathers.buffer.parameter_groups
        params = [param for bucket in buckets for param in groups[bucket].params]

        def run() -> None:
            gathers.all_gather_params(params)
            for bucket in buckets:
                gathers.wait_bucket_ready(bucket, False)

        super().__init__(capture, gathers.ag_stream, run)
        self._keys = [gathers.get_bucket_key(bucket, False) for bucket in buckets]
        self._fetch = [gathers.get_fsdp_buffer(bucket).fetch_bucket for bucket in buckets]
        # An eager gather points parameters to the current address of the bucket; a replay does not.
        self._viewing = [groups[bucket].params[0] for bucket in buckets]
        self._addresses = self._current_addresses()
        for bucket in buckets:
            gathers.release_bucket(bucket, False)

    def _current_addresses(self) -> list[int]:
        """Allocate the buckets, and return the addresses of buckets and parameters."""
        return [
            *[fetch().data.data_ptr() for fetch in self._fetch],
            *[param.data_ptr() for param in self._viewing],
        ]

    def launch(self) -> bool:
        """Launch the all-gather; return False if a bucket is already gathered or an address changed since capture."""
        gathers = self._gathers
        status = gathers.bucket_status
        for key in self._keys:
            if status[key] not in TO_GATHER:
                return False
        gathers.recycle_unused_buckets()
        if self._current_addresses() != self._addresses:
            return False
        self._replay()
        for key in self._keys:
            status[key] = BucketStatus.COMMUNICATING
            gathers.bucket_can_be_released[key] = False
            gathered = partial(status.__setitem__, key, BucketStatus.READY_TO_USE)
            gathers.param_gather_event_map[key] = (self, gathered)
        return True


class RecordedReduction(RecordedCollective):
    """Scales and reduce-scatters one group of gradient buckets, and adds the result to this rank's shard.

    Args:
        reductions: The reduction pipeline, with an empty queue.
        buckets: The indices of the buckets, all from the same unit and process group.
    """

    def __init__(self, capture: Capture, reductions: Any, buckets: list[int]):
        self._reductions, self.buckets = reductions, buckets
        dtype = reductions.buffer.mp_policy.grad_comm_dtype
        fetch = [partial(reductions.get_fsdp_buffer(bucket).fetch_bucket, dtype=dtype) for bucket in buckets]
        names = [f"the gradients of bucket {bucket}" for bucket in buckets]

        def current_addresses() -> list[int]:
            return [each().data.data_ptr() for each in fetch]

        self._places = Snapshot(ADVICE, Aspect(names, current_addresses, show=hex))
        reduce = partial(reductions._bucket_group_gradient_reduce, buckets, async_op=True)
        super().__init__(capture, reductions.rs_stream, reduce)
        self._queued = [(self, free, bucket) for _, free, bucket in reductions.grad_reduce_queue]
        reductions.grad_reduce_queue.clear()
        for _, free, _ in self._queued:
            free()

    def claim(self) -> None:
        """Make the buckets writable: wait for earlier reductions that read the same memory.

        Raises:
            ChangedSinceCaptureError: The address of a bucket changed since capture.
        """
        self._reductions._enforce_double_buffer_limit(self.buckets)
        self._places.check()

    def launch(self) -> bool:
        """Launch and queue the reduction; return False if the address of a bucket changed since capture."""
        if self._places.changed():
            return False
        reductions = self._reductions
        self._replay()
        for bucket in self.buckets:
            reductions.bucket_status[bucket] = BucketStatus.COMMUNICATING
        reductions.grad_reduce_queue.extend(self._queued)
        return True


def record(fsdp: Any, buckets: Iterable[int], *, reductions: bool) -> None:
    """Record all-gathers of ``buckets``, and with ``reductions`` their gradient reductions; no bucket may be in use."""
    capture = Capture(None, draws=False)
    gathers, reduces = fsdp.all_gather_pipeline, fsdp.grad_reduce_pipeline
    for group in _groups(fsdp, buckets):
        if group[0] in gathers.recorded:
            continue
        gathers.recorded.update(dict.fromkeys(group, RecordedGather(capture, gathers, group)))
        if reductions and (with_grads := reduces.with_grads(group)):
            reduces.recorded[with_grads[0]] = RecordedReduction(capture, reduces, with_grads)


def forget(fsdp: Any, buckets: Iterable[int]) -> None:
    """Free the graphs recorded for ``buckets``."""
    for bucket in buckets:
        for recorded in (fsdp.all_gather_pipeline.recorded, fsdp.grad_reduce_pipeline.recorded):
            if bucket in recorded:
                recorded.pop(bucket).reset()


def set_up_communicators(fsdp: Any, buckets: Iterable[int], done: set[Any]) -> None:
    """Set up the communicators of ``buckets`` before a capture, with one reduction in each process group.

    This reduces stale gradients, which the caller zeroes later. Call it after ``take_places``.

    Args:
        done: The process groups whose communicators are set up; updated even if a reduction fails.
    """
    reductions = fsdp.grad_reduce_pipeline
    for group in _groups(fsdp, buckets):
        with_grads = reductions.with_grads(group)
        process_group = reductions.get_fsdp_buffer(with_grads[0]).data_parallel_group if with_grads else None
        if process_group is not None and process_group not in done:
            launched = launches_of(process_group)
            try:
                reductions._bucket_group_gradient_reduce(with_grads)
            finally:
                if launched():
                    done.add(process_group)


def launches_of(group: torch.distributed.ProcessGroup) -> Callable[[], bool]:
    """Return a function that checks whether this rank has launched a collective in ``group`` since this call."""
    if torch.distributed.get_backend(group) == "fake":  # neither communicates nor counts collectives
        return lambda: True
    before = group._get_sequence_number_for_group()
    return lambda: group._get_sequence_number_for_group() != before


def _groups(fsdp: Any, buckets: Iterable[int]) -> list[tuple[int, ...]]:
    """Return the groups that contain ``buckets``; the buckets of a group are gathered or reduced together."""
    groups = fsdp.param_and_grad_buffer.bucket_to_bucket_group
    return sorted({tuple(sorted(groups[bucket])) for bucket in buckets})
