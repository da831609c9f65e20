"""Extend Megatron-FSDP's buffers and pipelines in these ways:

- Each model has its own double buffer, and a bucket is overwritten only after the reduction that reads it.
- Gradients that accumulate in place are scaled only once, and averaged expert gradients are scaled correctly.
- Recorded collectives are replayed.
- The copies around the optimizer step are planned once.
"""

import weakref
from collections.abc import Collection, Iterable
from contextlib import nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

from .optimizer_gradients import (
    OptimizerGradients,
    PlannedCopies,
    copies_of_weights,
)
from .unsharded_gradients import UnshardedGradients

_upstream: Any = extend(__name__)


if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


TO_GATHER = (_upstream.BucketStatus.EMPTY, _upstream.BucketStatus.PRESERVED)
_allocators = count()


class _OwnBuffers:
    """Mixin that gives the fixed buffers of an allocator unique names, and frees them with the allocator.

    In megatron-core, models share buffers of the same ``name``: a second model would gather its parameters into the
    first model's buffers, or replace the buffers with larger ones.
    """

    def __init__(self, name: str, *args: Any, **kwargs: Any):
        own = f"{name}_of_allocator_{next(_allocators)}"
        weakref.finalize(self, _free_buffers, f"{own}_").atexit = False
        super().__init__(own, *args, **kwargs)  # type: ignore[call-arg]

    def free_buffers(self) -> None:
        """Free the buffers, which must not be in use; the next allocation makes new ones."""
        for memory in _free_buffers(f"{self.name}_"):  # type: ignore[attr-defined]
            memory.untyped_storage().resize_(0)  # parameters remain views of it


def _free_buffers(prefix: str) -> list[torch.Tensor]:
    buffers = _upstream.get_global_memory_buffer().buffer
    # Garbage collection may free another allocator during the loop.
    return [
        memory for key in list(buffers) if key[0].startswith(prefix) and (memory := buffers.pop(key, None)) is not None
    ]


class FixedPoolAllocator(_OwnBuffers, _upstream.FixedPoolAllocator):
    """Extends megatron-core's ``FixedPoolAllocator`` (for units of equal size) to not share buffers between models."""


class MaxPoolAllocator(_OwnBuffers, _upstream.MaxPoolAllocator):
    """Extends megatron-core's ``MaxPoolAllocator`` (for units of any size) to not share buffers between models."""


class DataParallelBuffer(_upstream.DataParallelBuffer):
    """Extends megatron-core's ``DataParallelBuffer`` to keep unsharded gradients in place."""

    def reset_param_main_grad(self) -> None:
        """Clear ``main_grad`` of parameters with sharded gradients. Unsharded gradients have no bucket to free."""
        for param in self.params if self.is_data_distributed else ():
            param.main_grad = None


def _create_hfsdp_helper_buffer(dp_buffer: Any, *args: Any, **kwargs: Any) -> Any:
    """Create the buffer of an HSDP replica's gradients or weights; see megatron-core.

    Gradients get the same scaling factor as without replicas; megatron-core leaves them unscaled.
    """
    helper = _upstream._create_hfsdp_helper_buffer(dp_buffer, *args, **kwargs)
    helper.gradient_scaling_factor = dp_buffer.gradient_scaling_factor
    return helper


def gradient_reduce_preprocessing(grad_data: torch.Tensor, scaling_factor: float | None, ddp_config: Any) -> Any:
    """Scale ``grad_data`` unless the collective does, and return the reduction operation; see megatron-core.

    With ``average_in_collective``, megatron-core never scales, so expert gradients would be too large by the
    expert-parallel size: they are averaged only over ranks with the same expert, but tokens come from all ranks.
    """
    op = _upstream.gradient_reduce_preprocessing(grad_data, scaling_factor, ddp_config)
    if scaling_factor not in (None, 1.0) and op == torch.distributed.ReduceOp.AVG:
        grad_data.mul_(scaling_factor)
    return op


def make_fsdp_dtensor(*args: Any, run_check: bool = False, **kwargs: Any) -> Any:
    """Create the DTensor of a parameter's shard; see megatron-core.

    megatron-core also compares dtypes of tensor-parallel parameters over all ranks of the job, although pipeline stages
    have different parameters. Shard bounds are checked only among the ranks that share the parameter.
    """
    tensor = _upstream.make_fsdp_dtensor(*args, **kwargs)
    if run_check:
        _upstream.validate_uneven_dtensor(tensor)
    return tensor


class ParamAndGradBuffer(_upstream.ParamAndGradBuffer):
    """Extends megatron-core's ``ParamAndGradBuffer`` to plan the copies of a step only once.

    Attributes:
        unsharded_gradients: The gradients that accumulate in place and are scaled at the end of a step.
        gathers: The all-gather pipeline; None before it is created.
        optimizer_grads: The gradients of the optimizer's parameters, if they stay the same objects; otherwise None.
    """

    gathers: "AllGatherPipeline | None" = None
    optimizer_grads: OptimizerGradients | None = None
    _weight_copies: PlannedCopies | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.unsharded_gradients = UnshardedGradients(self)
        self._on_host: list[tuple[torch.Tensor, torch.Tensor]] = []  # offloaded main weights, each with its copy

    def update_main_grads(self) -> None:
        """Attach the main gradients to the optimizer's parameters; see megatron-core."""
        self.check_main_weights()
        if self.optimizer_grads is not None:
            if self.optimizer_grads.unmoved(self):
                self.optimizer_grads.update()
                return
            self.optimizer_grads.release()  # other code may hold these objects until the optimizer has stepped
        elif self.ddp_config.megatron_fsdp_cuda_graph_mode and not torch.cuda.is_current_stream_capturing():
            # Allocated from cached activation memory, gradients and the optimizer's first states would leave gaps that
            # only eager passes can use: graphs have their own pool.
            torch.cuda.empty_cache()
        super().update_main_grads()
        if self.ddp_config.megatron_fsdp_cuda_graph_mode:  # otherwise ``zero_grad`` frees them
            self.optimizer_grads = OptimizerGradients(self)

    def scale_gradients(self, scaling_factor: Any) -> None:
        """Scale the main gradients and the optimizer's casts of them; see megatron-core.

        megatron-core casts again, although sums over tensor-parallel ranks and pipeline stages are only in the casts.
        """
        main_grads = [group.main_grad_buffer.data for group in self.parameter_groups if group.main_grad_buffer]
        for grads in main_grads:
            grads *= scaling_factor
        storages = {grads.untyped_storage().data_ptr() for grads in main_grads}
        grads = [param.grad._local_tensor for _, param in self.optimizer_named_parameters if param.grad is not None]
        casts = [grad for grad in grads if grad.untyped_storage().data_ptr() not in storages]
        if casts:
            torch._foreach_mul_(casts, scaling_factor)

    def leave_graphs(self) -> None:
        """Move the memory of the optimizer's gradients out of the pools of freed graphs."""
        if self.optimizer_grads is not None:
            self.optimizer_grads.storages.detach()

    def free_buckets(self) -> None:
        """Free the memory of all buckets unless it is registered with NCCL; no bucket may be in use."""
        members = [each for group in self.parameter_groups for each in vars(group).values()]
        buffers = [each for each in members if isinstance(each, _upstream.DataParallelBuffer)]
        for buffer in buffers:
            buffer.free_bucket_storage()
        for allocator in {buffer.temporary_bucket_allocator for buffer in buffers}:
            if isinstance(allocator, _OwnBuffers) and not self.ddp_config.nccl_ub:
                allocator.free_buffers()

    def zero_grad(self) -> None:
        """Zero the main gradients; see megatron-core.

        The optimizer's parameters have no gradients until ``update_main_grads``, unless a graph reads them.
        """
        super().zero_grad()
        if self.optimizer_grads is not None:
            self.optimizer_grads.release()

    def offload_main_weights(self) -> None:
        """Move the main weights to the host; the optimizer's parameters remain views of the freed device memory."""
        for group in self.parameter_groups if not self._on_host else ():
            if group.main_weight_buffer is not None:
                weights = group.main_weight_buffer.data
                self._on_host.append((weights, weights.cpu()))
                weights.untyped_storage().resize_(0)

    def restore_main_weights(self) -> None:
        """Move the main weights back to the device; their addresses may change."""
        for weights, copy in self._on_host:
            weights.untyped_storage().resize_(copy.nbytes)
            weights.copy_(copy)
        self._on_host.clear()

    def check_main_weights(self) -> None:
        """Raise RuntimeError if the main weights are offloaded to the host and their device memory is freed."""
        if self._on_host:
            raise RuntimeError("the optimizer's weights are on the host: call optimizer.restore_from_cpu() first")

    def copy_main_weights_to_model_weights(self) -> None:
        """Copy the optimizer's weights to the model's, quantizing FP8 weights; see megatron-core."""
        self.check_main_weights()
        if self.gathers is not None:  # gathered weights are about to become stale
            self.gathers.gathered_across_replicas = False
            self.gathers.release_gathered()
        if self._weight_copies is None:
            self._weight_copies = copies_of_weights(self)
        if self._weight_copies is not None and self._weight_copies.in_place():
            self._weight_copies.run()
            return
        self._weight_copies = None
        super().copy_main_weights_to_model_weights()


class AllGatherPipeline(_upstream.AllGatherPipeline):
    """Extends megatron-core's ``AllGatherPipeline`` to replay recorded all-gathers.

    It can also gather all parameters across HSDP replicas at once.

    Attributes:
        across_replicas: For each bucket, the event after its gather across replicas. Graphs of forward passes wait for
            these events.
        gathered_across_replicas: Whether all current weights have been gathered across HSDP replicas.
        recording: Whether a graph that waits for these events is being recorded.
        recorded: The ``RecordedGather`` of each bucket that has one.
    """

    _awaited: bool  # whether the current stream has waited for all of ``across_replicas``

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.across_replicas: dict[int, torch.cuda.Event] = {}
        self.gathered_across_replicas = False
        self.recording = False
        self.recorded: dict[int, Any] = {}
        self.buffer.gathers = self

    def settle(self) -> None:
        """Wait for all-gathers in flight."""
        for bucket, bwd in list(self.param_gather_event_map):
            self.wait_bucket_ready(bucket, bwd)

    def release_gathered(self) -> None:
        """Release gathered parameters; parameters outside of units keep their memory for the next gather."""
        if any(status not in TO_GATHER for status in self.bucket_status.values()):
            self.settle()
            self.reset()

    def start_gather(self, bucket: int) -> None:
        """Start gathering a bucket and its group, unless already gathered; replay a recorded all-gather if possible."""
        if self.bucket_status[bucket, False] not in TO_GATHER:
            return
        recorded = self.recorded.get(bucket)
        if recorded is None or not recorded.launch():
            groups = [self.buffer.parameter_groups[each] for each in self.buffer.bucket_to_bucket_group[bucket]]
            self.all_gather_params([param for group in groups for param in group.params])

    def async_bucket_gather(self, bucket_id: int, bwd: bool) -> None:
        """Gather a bucket; when recording a graph, after its gather across HSDP replicas. See megatron-core."""
        if self.recording:
            torch.cuda.current_stream().wait_event(self.across_replicas[bucket_id])
        super().async_bucket_gather(bucket_id, bwd)

    def all_gather_params(
        self, params: list[torch.nn.Parameter], *args: Any, outer_fsdp_group_param_gather: bool = False, **kwargs: Any
    ) -> None:
        """Gather the buckets of ``params``; see megatron-core."""
        across_replicas = outer_fsdp_group_param_gather and not self.gathered_across_replicas
        super().all_gather_params(params, *args, outer_fsdp_group_param_gather=across_replicas, **kwargs)

    def gather_across_replicas(self, replayed: Collection[int] = ()) -> None:
        """Gather the parameters that are sharded across HSDP replicas, if any, once per step.

        Later gathers in the same step stay within a replica.

        Args:
            replayed: Buckets used only in graphs, which wait for them. The current stream waits for all other buckets.
        """
        if not self.buffer.dist_index.hsdp_outer_dp_shard:
            return
        current, stream = torch.cuda.current_stream(), self.outer_fsdp_group_param_gather_stream
        if not self.gathered_across_replicas:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self._gather_across_replicas()
            self.gathered_across_replicas, self._awaited = True, False
        if self._awaited:
            return
        for bucket in self.across_replicas.keys() - replayed:
            current.wait_event(self.across_replicas[bucket])
        self._awaited = not replayed

    def _gather_across_replicas(self) -> None:
        buffer = self.buffer
        # The next pass needs parameters outside of units first.
        order = sorted(enumerate(buffer.parameter_groups), key=lambda each: each[1].fsdp_unit_id is not None)
        for bucket, params in order:
            group = buffer.dist_index.get_outer_fsdp_group(is_expert_parallel=params.is_expert_param)
            for weights in dict.fromkeys(self.get_fsdp_buffer(bucket, bwd).data for bwd in (False, True)):
                own = weights.chunk(group.size())[group.rank()]
                torch.distributed.all_gather_into_tensor(output_tensor=weights, input_tensor=own, group=group)
            self.across_replicas.setdefault(bucket, torch.cuda.Event(external=True)).record()


class GradReducePipeline(_upstream.GradReducePipeline):
    """Extends megatron-core's ``GradReducePipeline`` to protect a double buffer while a reduction reads it.

    Attributes:
        recorded: The ``RecordedReduction`` of each bucket group, keyed by the group's first bucket.
        marked: During a capture under HSDP, the event after the reduction of each bucket group; otherwise None. Keys
            are bucket groups in capture order.
        replayed: In a replayed backward pass, the ``marked`` events of its graph; empty in an eager pass.
        order: The order of bucket groups in reductions across HSDP replicas.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.recorded: dict[int, Any] = {}
        self.marked: dict[tuple[int, ...], torch.cuda.Event] | None = None
        self.replayed: dict[tuple[int, ...], torch.cuda.Event] = {}
        groups = {tuple(self.with_grads(sorted(group))) for group in self.buffer.bucket_to_bucket_group.values()}
        self.order = sorted(filter(None, groups), reverse=True)

    def with_grads(self, buckets: Iterable[int]) -> list[int]:
        """Return the ``buckets`` that have gradients."""
        return [bucket for bucket in buckets if bucket in self.bucket_status]

    def _enforce_double_buffer_limit(self, add_buckets: list[int]) -> None:
        """Release gradient buckets to make room for ``add_buckets``, and wait for their reductions.

        megatron-core releases a bucket once its reduction is queued, and only the reduction stream waits. The current
        stream runs ahead and would overwrite the bucket with the next unit's gradients.
        """
        queued = list(self.grad_reduce_queue)
        super()._enforce_double_buffer_limit(add_buckets)
        for reduced, *_ in queued[: len(queued) - len(self.grad_reduce_queue)]:
            reduced.wait()

    def _bucket_group_gradient_reduce(
        self, bucket_group: list[int], async_op: bool = False, outer_fsdp_group_grad_reduce: bool = False
    ) -> bool:
        """Reduce a group of complete buckets; see megatron-core.

        A recorded reduction within an HSDP replica (without HSDP, over all ranks) is replayed.
        """
        recorded = self.recorded.get(bucket_group[0])
        if recorded is None or not async_op or not recorded.launch():
            unsharded = self.buffer.unsharded_gradients
            with unsharded.left_in_place() if bucket_group[0] in unsharded.buckets else nullcontext():
                super()._bucket_group_gradient_reduce(bucket_group, async_op=async_op)
        if self.marked is not None:
            self.marked[tuple(sorted(bucket_group))] = done = torch.cuda.Event(external=True)
            done.record(self.rs_stream)
        if outer_fsdp_group_grad_reduce:
            self.reduce_across_replicas(bucket_group)
            if not async_op:
                self.wait_for_previous_grad_reduce(0)
        return True

    def reduce_all_across_replicas(self) -> None:
        """Queue the reductions of all buckets across HSDP replicas, after their reductions within each replica.

        In a replayed pass, each bucket waits only for its own reduction within the replica, so its reduction across
        replicas overlaps with the rest of the replay.
        """
        for group in self.order:
            self._enforce_double_buffer_limit([*group])
            self.reduce_across_replicas([*group], self.replayed.get(group))

    def reduce_across_replicas(self, bucket_group: list[int], after: torch.cuda.Event | None = None) -> None:
        """Queue the reduction of a bucket group's accumulated gradients across HSDP replicas.

        Gradients are summed or averaged in the gradient communication dtype. Each replica keeps all of them, or its
        shard. Unsharded gradients are scaled first; all others were scaled within the replica.

        Args:
            after: The event of the reduction within the replica; None waits for all work on the current stream.
        """
        buffer, stream = self.buffer, self.outer_fsdp_group_grad_reduce_stream
        config, dtype = buffer.ddp_config, buffer.mp_policy.grad_comm_dtype
        to_send = {bucket: buffer.parameter_groups[bucket].hsdp_comm_gbuf for bucket in bucket_group}
        group = buffer.dist_index.get_outer_fsdp_group()  # even for experts, as in megatron-core
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
