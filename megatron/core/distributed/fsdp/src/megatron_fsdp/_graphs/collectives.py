"""All-gathers and reductions that are recorded as CUDA graphs of their own.

Under the double buffer a unit's parameters are gathered from and to the same addresses in every pass, and its gradients
reduced likewise. A replay is one launch; the collective itself costs the host a walk through buckets and NCCL's calls.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from megatron.core.transformer._cuda_graphs.engine.graph import Capture
from megatron.core.transformer._cuda_graphs.errors import ChangedSinceCaptureError
from megatron.core.transformer._cuda_graphs.launches import launches_of

from ..param_and_grad_buffer import BucketStatus
from .unit import ADVICE

TO_GATHER = (BucketStatus.EMPTY, BucketStatus.PRESERVED)


class RecordedWork:
    """Work on a communication stream that is recorded in a graph.

    All ranks must replay recorded collectives, and run others, in the same order. The graph must be freed before the
    communicator: NCCL keeps a communicator alive as long as a graph holds work of it.

    Args:
        run: Enqueues the work on the current stream, or on others that join it.
    """

    def __init__(self, capture: Capture, stream: torch.cuda.Stream, run: Callable[[], Any]):
        self._stream, self._device = stream, stream.device_index
        self._graph = capture.new_graph()
        self._ready, self._done = torch.cuda.Event(), torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), capture.recording(self._graph):
            run()

    def launch(self) -> None:
        """Run it once the current stream has finished its work so far."""
        # torch looks the current stream up several times slower without the device.
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
        """Let the current stream wait for the last launch."""
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def reset(self) -> None:
        """Free the graph."""
        self._graph.reset()


class RecordedGather:
    """The all-gather of one group of parameter buckets.

    Args:
        gathers: The pipeline of all-gathers; no bucket of ``buckets`` is in use.
        buckets: The indices of the buckets, all of one unit and of one process group.
    """

    def __init__(self, capture: Capture, gathers: Any, buckets: Sequence[int]):
        self._gathers = gathers
        groups = gathers.buffer.parameter_groups
        params = [param for bucket in buckets for param in groups[bucket].params]

        def run() -> None:
            gathers.all_gather_params(params)
            for bucket in buckets:
                gathers.wait_bucket_ready(bucket, False)

        self.work = RecordedWork(capture, gathers.ag_stream, run)
        self._buckets = [
            (gathers.get_bucket_key(bucket, False), buffer, buffer.fetch_bucket().data.data_ptr())
            for bucket, buffer in zip(buckets, map(gathers.get_fsdp_buffer, buckets), strict=True)
        ]
        # An eager gather lets parameters view the bucket, wherever that is then; a replay leaves them as they are.
        self._views = [(param, param.data_ptr()) for param in (groups[bucket].params[0] for bucket in buckets)]
        for bucket in buckets:
            gathers.release_bucket(bucket, False)

    def launch(self) -> bool:
        """Start the all-gather; return False if a bucket is gathered or something is not where it was at capture."""
        gathers = self._gathers
        status = gathers.bucket_status
        for key, _, _ in self._buckets:
            if status[key] not in TO_GATHER:
                return False
        gathers.recycle_unused_buckets()
        for _, buffer, address in self._buckets:
            if buffer.fetch_bucket().data.data_ptr() != address:
                return False
        for param, address in self._views:
            if param.data_ptr() != address:
                return False
        self.work.launch()
        for key, _, _ in self._buckets:
            status[key] = BucketStatus.COMMUNICATING
            gathers.bucket_can_be_released[key] = False
            gathered = partial(status.__setitem__, key, BucketStatus.READY_TO_USE)
            gathers.param_gather_event_map[key] = (self.work, gathered)
        return True


class RecordedReduction:
    """The reduction of one group of gradient buckets: scaling, reduce-scatter, addition to the rank's shard.

    Args:
        reductions: The pipeline of reductions, whose queue is empty.
        buckets: The indices of the buckets, all of one unit and of one process group.
    """

    def __init__(self, capture: Capture, reductions: Any, buckets: list[int]):
        self._reductions, self.buckets = reductions, list(buckets)
        dtype = reductions.buffer.mp_policy.grad_comm_dtype
        self._fetch = [partial(reductions.get_fsdp_buffer(bucket).fetch_bucket, dtype=dtype) for bucket in buckets]
        self._addresses = [fetch().data.data_ptr() for fetch in self._fetch]
        reduce = partial(reductions._bucket_group_gradient_reduce, self.buckets, async_op=True)
        self.work = RecordedWork(capture, reductions.rs_stream, reduce)
        self._queued = [(self.work, free, bucket) for _, free, bucket in reductions.grad_reduce_queue]
        reductions.grad_reduce_queue.clear()
        for _, free, _ in self._queued:
            free()

    def claim(self) -> None:
        """Claim the buckets, once earlier reductions have read what is in their place.

        Raises:
            ChangedSinceCaptureError: a bucket cannot go where it was at capture.
        """
        self._reductions._enforce_double_buffer_limit(self.buckets)
        for bucket, fetch, address in zip(self.buckets, self._fetch, self._addresses, strict=True):
            now = fetch().data.data_ptr()
            if now != address:
                raise ChangedSinceCaptureError(
                    f"changed since capture: the gradients of bucket {bucket} ({address:#x} at capture, {now:#x} now); "
                    f"{ADVICE}"
                )

    def launch(self) -> bool:
        """Start and queue the reduction; return False if a bucket is not where it was at capture."""
        if [fetch().data.data_ptr() for fetch in self._fetch] != self._addresses:
            return False
        reductions = self._reductions
        self.work.launch()
        for bucket in self.buckets:
            reductions.bucket_status[bucket] = BucketStatus.COMMUNICATING
        reductions.grad_reduce_queue.extend(self._queued)
        return True


def record(fsdp: Any, buckets: Iterable[int], *, reductions: bool) -> None:
    """Record the all-gathers of ``buckets``, and their reductions if so asked; none is in use before or after."""
    capture = Capture(None, draws=False)
    gathers, reduces = fsdp.all_gather_pipeline, fsdp.grad_reduce_pipeline
    for group in _groups(fsdp, buckets):
        if group[0] in gathers.recorded:
            continue
        gathers.recorded.update(dict.fromkeys(group, RecordedGather(capture, gathers, group)))
        with_grads = [bucket for bucket in group if bucket in reduces.bucket_status]
        if reductions and with_grads:
            reduces.recorded[with_grads[0]] = RecordedReduction(capture, reduces, with_grads)


def forget(fsdp: Any, buckets: Iterable[int]) -> None:
    """Free what is recorded for ``buckets``."""
    for bucket in buckets:
        for recorded in (fsdp.all_gather_pipeline.recorded, fsdp.grad_reduce_pipeline.recorded):
            if bucket in recorded:
                recorded.pop(bucket).work.reset()


def set_up_communicators(fsdp: Any, buckets: Iterable[int], done: set[Any]) -> None:
    """Reduce once in each process group that reduces ``buckets``: captures cannot set up communicators.

    The content of the buckets is reduced; the caller zeroes gradients later. The buckets have their places already,
    and keep them (``take_places``).

    Args:
        done: The process groups that have reduced; extended by those whose reduction was launched, even if it failed.
    """
    reductions = fsdp.grad_reduce_pipeline
    for group in _groups(fsdp, buckets):
        with_grads = [bucket for bucket in group if bucket in reductions.bucket_status]
        process_group = reductions.get_fsdp_buffer(with_grads[0]).data_parallel_group if with_grads else None
        if process_group is not None and process_group not in done:
            launched = launches_of(process_group)
            try:
                reductions._bucket_group_gradient_reduce(with_grads)
            finally:
                if launched():
                    done.add(process_group)


def _groups(fsdp: Any, buckets: Iterable[int]) -> list[tuple[int, ...]]:
    """Return the groups of ``buckets`` that are gathered or reduced together."""
    groups = fsdp.param_and_grad_buffer.bucket_to_bucket_group
    return sorted({tuple(sorted(groups[bucket])) for bucket in buckets})
