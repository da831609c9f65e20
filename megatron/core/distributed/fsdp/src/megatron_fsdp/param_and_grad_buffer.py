"""Megatron-FSDP's buffers and pipelines.

Each model has its own double buffer, a data race of double buffering is fixed, weights can stay in place without a
double buffer, gradients that accumulate in place are scaled once, recorded reductions are replayed, buckets that are
released are not released again, averages over the ranks that have an expert are scaled, and the copies around the
optimizer's step are planned once.
"""

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

from .optimizer_gradients import GradientStorages, OptimizerGradients, PlannedCopies, copies_of_weights
from .unsharded_gradients import UnshardedGradients

_upstream: Any = extend(__name__)


if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


_allocators = count()


def name_of_own_buffers(allocator: object, name: str) -> str:
    """Return a name for the fixed buffers of ``allocator`` alone, which are freed when it goes.

    megatron-core keeps them in a dictionary of the process, by ``name``, which is the same for all models: a second
    model would gather its parameters to the buffers of the first, or replace them by larger ones.
    """
    own = f"{name}_of_allocator_{next(_allocators)}"
    weakref.finalize(allocator, _free_buffers, f"{own}_").atexit = False
    return own


def _free_buffers(prefix: str) -> None:
    buffers = _upstream.get_global_memory_buffer().buffer
    for key in list(buffers):  # another allocator may end meanwhile
        if key[0].startswith(prefix):
            buffers.pop(key, None)


class FixedPoolAllocator(_upstream.FixedPoolAllocator):
    """megatron-core's ``FixedPoolAllocator`` (buffers for units of one size) with buffers of its own."""

    def __init__(self, name: str, *args: Any, **kwargs: Any):
        super().__init__(name_of_own_buffers(self, name), *args, **kwargs)


class MaxPoolAllocator(_upstream.MaxPoolAllocator):
    """megatron-core's ``MaxPoolAllocator`` (buffers for units of any size) with buffers of its own."""

    def __init__(self, name: str, *args: Any, **kwargs: Any):
        super().__init__(name_of_own_buffers(self, name), *args, **kwargs)


class StorageResizeBasedBucketAllocator(_upstream.StorageResizeBasedBucketAllocator):
    """megatron-core's ``StorageResizeBasedBucketAllocator`` (memory that comes and goes), which can keep buckets.

    Attributes:
        kept: The buckets whose memory stays where it is when they are freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: frozenset[int] = frozenset()

    def free(self, bucket_id: int) -> None:
        """Free the memory of a bucket, unless it is kept."""
        if bucket_id in self.kept:
            return
        super().free(bucket_id)


class DataParallelBuffer(_upstream.DataParallelBuffer):
    """megatron-core's ``DataParallelBuffer``, whose whole gradients keep their place."""

    def reset_param_main_grad(self) -> None:
        """Take ``main_grad`` from parameters whose gradients are sharded: others have no memory that could be freed."""
        for param in self.params if self.is_data_distributed else ():
            param.main_grad = None


def _create_hfsdp_helper_buffer(dp_buffer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the buffer of an instance's gradients or weights; see megatron-core, which leaves gradients unscaled.

    It is the instance's that is reduced with scaling, as is a buffer without instances.
    """
    helper = _upstream._create_hfsdp_helper_buffer(dp_buffer, *args, **kwargs)
    helper.gradient_scaling_factor = dp_buffer.gradient_scaling_factor
    return helper


def gradient_reduce_preprocessing(grad_data: torch.Tensor, scaling_factor: float | None, ddp_config: Any) -> Any:
    """Scale ``grad_data`` where the collective does not, and return its reduction; see megatron-core.

    With ``average_in_collective`` megatron-core scales nothing. Gradients of an expert are averaged over the ranks that
    have it, which are fewer than those that its tokens come from: they would be too large by the expert-parallel size.
    """
    op = _upstream.gradient_reduce_preprocessing(grad_data, scaling_factor, ddp_config)
    if scaling_factor not in (None, 1.0) and op == torch.distributed.ReduceOp.AVG:
        grad_data.mul_(scaling_factor)
    return op


def make_fsdp_dtensor(*args: Any, run_check: bool = False, **kwargs: Any) -> Any:
    """Return the DTensor of a parameter's shard; see megatron-core.

    megatron-core lets torch compare dtypes of a tensor-parallel parameter over all ranks of the job, of which another
    pipeline stage has other parameters. Here only the bounds of shards are checked, among the ranks that have them.
    """
    tensor = _upstream.make_fsdp_dtensor(*args, **kwargs)
    if run_check:
        _upstream.validate_uneven_dtensor(tensor)
    return tensor


class ParamAndGradBuffer(_upstream.ParamAndGradBuffer):
    """megatron-core's ``ParamAndGradBuffer`` that plans once what it does in every step.

    Attributes:
        unsharded_gradients: The gradients that accumulate in place, which are scaled at the end of a step.
        gathered_between_instances: Whether all weights have been gathered between the instances of hybrid sharding
            since they changed.
        gathers: The pipeline that gathers weights; None before it is made.
    """

    gathered_between_instances = False
    gathers: "AllGatherPipeline | None" = None
    _gradients_in_place = False
    _gradients: OptimizerGradients | None = None
    _weight_copies: PlannedCopies | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.unsharded_gradients = UnshardedGradients(self)

    def update_main_grads(self) -> None:
        """Attach the main gradients to the optimizer's parameters; see megatron-core."""
        if self._gradients is not None:
            if self._gradients.unmoved(self):
                self._gradients.update()
                return
            self._gradients.release()  # others may keep these objects until the optimizer has stepped
        elif self.ddp_config.megatron_fsdp_cuda_graph_mode and not torch.cuda.is_current_stream_capturing():
            # In cached memory of activations gradients, and the optimizer's first states, would leave gaps between
            # them, which only eager passes fill: graphs have a pool of their own.
            torch.cuda.empty_cache()
        super().update_main_grads()
        if self.ddp_config.megatron_fsdp_cuda_graph_mode:  # otherwise ``zero_grad`` frees them
            in_place = self._gradients_in_place or torch.cuda.is_current_stream_capturing()
            self._gradients = OptimizerGradients(self, in_place=in_place)

    def keep_gradients_in_place(self) -> None:
        """Leave the gradients of the optimizer's parameters attached and in place: a graph of its step reads them."""
        self._gradients_in_place, self._gradients = True, None

    def keep_weights(self, buckets: frozenset[int], keep: bool) -> None:
        """Let the gathered weights of ``buckets`` stay in place when they are released, or come and go again.

        There are none with a double buffer, whose memory stays in place in any case.
        """
        for allocator in (self.weight_alloc, self.transpose_weight_alloc) if buckets else ():
            allocator.kept = allocator.kept | buckets if keep else allocator.kept - buckets

    def gradient_storages(self) -> GradientStorages | None:
        """The memory for the optimizer's gradients that comes and goes; None if there is none of that kind now.

        It is not in use from ``zero_grad`` to ``update_main_grads``.
        """
        gradients = self._gradients
        return None if gradients is None or gradients.in_place else gradients.storages

    def leave_graphs(self) -> None:
        """Keep the memory for the optimizer's gradients out of graphs' pools: these graphs are no more."""
        storages = self.gradient_storages()
        if storages is not None:
            storages.detach()

    def zero_grad(self) -> None:
        """Zero the main gradients; see megatron-core.

        The optimizer's parameters have no gradients until ``update_main_grads``, unless a graph reads them.
        """
        super().zero_grad()
        if self._gradients is not None:
            self._gradients.release()

    def before_weights_change(self) -> None:
        """Forget what was gathered ahead of the next pass, which would compute with former weights."""
        self.gathered_between_instances = False
        if self.gathers is not None:
            self.gathers.release_gathered()

    def copy_main_weights_to_model_weights(self) -> None:
        """Copy the optimizer's weights to the model's, quantized where these are; see megatron-core."""
        self.before_weights_change()
        if self._weight_copies is None:
            self._weight_copies = copies_of_weights(self)
        if self._weight_copies is not None and self._weight_copies.in_place():
            self._weight_copies.run()
            return
        self._weight_copies = None
        super().copy_main_weights_to_model_weights()


class AllGatherPipeline(_upstream.AllGatherPipeline):
    """megatron-core's ``AllGatherPipeline``, which releases only what is not released.

    It can gather all parameters between the instances of hybrid sharding at once.

    Attributes:
        between_instances: The events after which buckets have been gathered between instances, by bucket; graphs of
            forward passes wait for them.
        recording: Whether such a graph is being recorded.
        recorded: The ``RecordedGather`` of each bucket that has one.
    """

    _awaited: bool  # by the current stream, all of them

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.between_instances: dict[int, torch.cuda.Event] = {}
        self.recording = False
        self.recorded: dict[int, Any] = {}
        self.buffer.gathers = self

    def settle(self) -> None:
        """Wait for all-gathers in flight."""
        for bucket, bwd in list(self.param_gather_event_map):
            self.wait_bucket_ready(bucket, bwd)

    def release_gathered(self) -> None:
        """Release what is gathered; parameters outside of units keep their memory, and are gathered to it again."""
        kind = _upstream.BucketStatus
        if any(status is kind.READY_TO_USE or status is kind.COMMUNICATING for status in self.bucket_status.values()):
            self.settle()
            self.reset()

    @contextmanager
    def only(self, buckets: Collection[int]) -> Iterator[None]:
        """Meanwhile gather and prefetch none but ``buckets``: others count as gathered."""
        self.recycle_unused_buckets()
        kind = _upstream.BucketStatus
        to_gather = kind.EMPTY, kind.PRESERVED
        others = {key: each for key, each in self.bucket_status.items() if key[0] not in buckets and each in to_gather}
        self.bucket_status.update(dict.fromkeys(others, kind.READY_TO_USE))
        try:
            yield
        finally:
            self.bucket_status.update(others)

    def async_bucket_gather(self, bucket_id: int, bwd: bool) -> None:
        """Gather a bucket; see megatron-core."""
        if self.recording:
            torch.cuda.current_stream().wait_event(self.between_instances[bucket_id])
        super().async_bucket_gather(bucket_id, bwd)

    def all_gather_params(
        self, params: list[torch.nn.Parameter], *args: Any, outer_fsdp_group_param_gather: bool = False, **kwargs: Any
    ) -> None:
        """Gather the buckets of ``params``; see megatron-core."""
        between_instances = outer_fsdp_group_param_gather and not self.buffer.gathered_between_instances
        super().all_gather_params(params, *args, outer_fsdp_group_param_gather=between_instances, **kwargs)

    def gather_between_instances(self, replayed: Collection[int] = ()) -> None:
        """Gather all parameters between instances, which shard them, unless that was done in this step.

        The current stream waits for all but the buckets ``replayed``, which it uses in replays only. Afterwards buckets
        are gathered within an instance only.
        """
        current, stream = torch.cuda.current_stream(), self.outer_fsdp_group_param_gather_stream
        if not self.buffer.gathered_between_instances:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self._gather_between_instances()
            self.buffer.gathered_between_instances, self._awaited = True, False
        if self._awaited:
            return
        for bucket in self.between_instances.keys() - replayed:
            current.wait_event(self.between_instances[bucket])
        self._awaited = not replayed

    def _gather_between_instances(self) -> None:
        buffer = self.buffer
        # What is outside of units is needed first.
        order = sorted(enumerate(buffer.parameter_groups), key=lambda each: each[1].fsdp_unit_id is not None)
        for bucket, params in order:
            group = buffer.dist_index.get_outer_fsdp_group(is_expert_parallel=params.is_expert_param)
            for weights in dict.fromkeys(self.get_fsdp_buffer(bucket, bwd).data for bwd in (False, True)):
                own = weights.chunk(group.size())[group.rank()]
                torch.distributed.all_gather_into_tensor(output_tensor=weights, input_tensor=own, group=group)
            self.between_instances.setdefault(bucket, torch.cuda.Event(external=True)).record()

    def recycle_unused_buckets(self) -> None:
        """Release the buckets that are not used any more; see megatron-core."""
        empty = _upstream.BucketStatus.EMPTY
        for bucket, is_unused in self.bucket_can_be_released.items():
            if is_unused and self.bucket_status[bucket] is empty:
                self.bucket_can_be_released[bucket] = False
        super().recycle_unused_buckets()


class GradReducePipeline(_upstream.GradReducePipeline):
    """megatron-core's ``GradReducePipeline`` whose double buffer is not written while a reduction still reads it.

    Attributes:
        recorded: The ``RecordedReduction`` of a group of buckets, by the first bucket.
        marked: While a graph of a backward pass is recorded, the events that its replays record: for each group of
            buckets, in the order of the graph, when it has been reduced. None if nobody waits for them.
        replayed: Those of the backward pass under way, if it is a replay.
        order: The order in which groups of buckets are reduced between instances apart from the reductions within.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.recorded: dict[int, Any] = {}
        self.marked: dict[tuple[int, ...], torch.cuda.Event] | None = None
        self.replayed: dict[tuple[int, ...], torch.cuda.Event] = {}
        groups = map(sorted, self.buffer.bucket_to_bucket_group.values())
        with_grads = {tuple(bucket for bucket in group if bucket in self.bucket_status) for group in groups}
        self.order = sorted(filter(None, with_grads), reverse=True)

    def _enforce_double_buffer_limit(self, add_buckets: list[int]) -> None:
        """Release gradient buckets for ``add_buckets``, and let the current stream wait for their reductions.

        megatron-core releases a bucket as soon as its reduction is queued, and only the reduction stream waits for its
        end. The current stream, which runs ahead, then writes the next unit's gradients to that bucket.
        """
        queued = list(self.grad_reduce_queue)
        super()._enforce_double_buffer_limit(add_buckets)
        for reduced, *_ in queued[: len(queued) - len(self.grad_reduce_queue)]:
            reduced.wait()

    def _bucket_group_gradient_reduce(
        self, bucket_group: list[int], async_op: bool = False, outer_fsdp_group_grad_reduce: bool = False
    ) -> bool:
        """Reduce a group of complete buckets; see megatron-core.

        Within an instance of hybrid sharding, or if there are none, the reduction is replayed if it is recorded.
        """
        recorded = self.recorded.get(bucket_group[0])
        if recorded is None or not async_op or not recorded.launch():
            whole = self.buffer.unsharded_gradients
            with whole.left_in_place() if bucket_group[0] in whole.buckets else nullcontext():
                super()._bucket_group_gradient_reduce(bucket_group, async_op=async_op)
        if self.marked is not None:
            self.marked[tuple(sorted(bucket_group))] = done = torch.cuda.Event(external=True)
            done.record(self.rs_stream)
        if outer_fsdp_group_grad_reduce:
            self.reduce_between_instances(bucket_group)
            if not async_op:
                self.wait_for_previous_grad_reduce(0)
        return True

    def reduce_all_between_instances(self) -> None:
        """Reduce all buckets, which are reduced within each instance, between instances, and queue that.

        What a replay reduces is sent on beside the rest of the replay.
        """
        for group in self.order:
            self._enforce_double_buffer_limit([*group])
            self.reduce_between_instances([*group], self.replayed.get(group))

    def reduce_between_instances(self, bucket_group: list[int], after: torch.cuda.Event | None = None) -> None:
        """Reduce between instances the gradients of a group of buckets, which accumulated in a step, and queue that.

        They are added up, or averaged, in the dtype that gradients are communicated in, and each instance keeps all of
        them, or its shard. Those that a rank has whole are scaled first, as the others were within an instance.

        Args:
            bucket_group: The indices of the buckets.
            after: When they have been reduced within the instance; None for what the current stream has been given.
        """
        buffer, stream = self.buffer, self.outer_fsdp_group_grad_reduce_stream
        config, dtype = buffer.ddp_config, buffer.mp_policy.grad_comm_dtype
        to_send = {bucket: buffer.parameter_groups[bucket].hsdp_comm_gbuf for bucket in bucket_group}
        group = buffer.dist_index.get_outer_fsdp_group()  # of experts, too, as in megatron-core
        op = torch.distributed.ReduceOp.AVG if config.average_in_collective else torch.distributed.ReduceOp.SUM
        sharded, rank = config.outer_dp_sharding_strategy != "no_shard", group.rank()
        if after is not None:
            stream.wait_event(after)
        else:
            stream.wait_stream(torch.cuda.current_stream())
            if self.rs_stream is not None:
                stream.wait_stream(self.rs_stream)
        received = []
        with torch.cuda.stream(stream):
            with torch.distributed._coalescing_manager(group):
                for bucket, casts in to_send.items():
                    main_grads = self.get_fsdp_buffer(bucket)
                    grads = sent = main_grads.data
                    if dtype is not None and dtype != grads.dtype:
                        shard = main_grads.is_data_distributed
                        sent = casts.allocate_bucket_storage(shard, dtype, grads.device, init_values=grads).data
                    buffer.unsharded_gradients.scale_bucket(bucket, sent)
                    kept, own = (each.chunk(group.size())[rank] if sharded else each for each in (grads, sent))
                    if sharded:
                        torch.distributed.reduce_scatter_tensor(output=own, input=sent, op=op, group=group)
                    else:
                        torch.distributed.all_reduce(sent, group=group, op=op)
                    if sent is not grads:
                        received.append((kept, own))
            for kept, own in received:
                kept.copy_(own)
            done = stream.record_event()
        self.grad_reduce_queue.extend((done, casts.free_bucket_storage, bucket) for bucket, casts in to_send.items())
