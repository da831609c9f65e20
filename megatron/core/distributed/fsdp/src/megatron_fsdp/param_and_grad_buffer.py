"""Megatron-FSDP's buffers and pipelines.

Each model has its own double buffer, a data race of double buffering is fixed, weights can stay in place without a
double buffer, gradients that accumulate in place are scaled once, recorded reductions are replayed, buckets that are
released are not released again, and the copies around the optimizer's step are planned once.

Everything else in this module is megatron-core's.
"""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

from .buffer_names import name_of_own_buffers
from .gradient_storages import GradientStorages
from .optimizer_gradients import OptimizerGradients
from .unsharded_gradients import UnshardedGradients
from .weight_copies import WeightCopies

_upstream: Any = extend(__name__)


if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


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
    """

    _gradients_in_place = False
    _gradients: OptimizerGradients | None = None
    _weight_copies: WeightCopies | None = None

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
        super().update_main_grads()
        if self.ddp_config.megatron_fsdp_cuda_graph_mode:  # otherwise ``zero_grad`` frees them
            in_place = self._gradients_in_place or torch.cuda.is_current_stream_capturing()
            self._gradients = OptimizerGradients(self, in_place=in_place)

    def keep_gradients_in_place(self) -> None:
        """Leave the gradients of the optimizer's parameters attached and in place: a graph of its step reads them."""
        self._gradients_in_place, self._gradients = True, None

    def keep_weights(self, buckets: frozenset[int], keep: bool) -> None:
        """Let the gathered weights of ``buckets`` stay in place when they are released, or come and go again.

        Not with a double buffer, whose memory stays in place in any case.
        """
        for allocator in (self.weight_alloc, self.transpose_weight_alloc):
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
            storages.leave()

    def zero_grad(self) -> None:
        """Zero the main gradients; see megatron-core.

        The optimizer's parameters have no gradients until ``update_main_grads``, unless a graph reads them.
        """
        super().zero_grad()
        if self._gradients is not None:
            self._gradients.release()

    def copy_main_weights_to_model_weights(self) -> None:
        """Copy the optimizer's weights to the model's, quantized where these are; see megatron-core."""
        if self._weight_copies is None and WeightCopies.plannable(self):
            self._weight_copies = WeightCopies(self)
        if self._weight_copies is not None and self._weight_copies.unmoved():
            self._weight_copies.run()
            return
        self._weight_copies = None
        super().copy_main_weights_to_model_weights()


class AllGatherPipeline(_upstream.AllGatherPipeline):
    """megatron-core's ``AllGatherPipeline``, which releases only what is not released."""

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
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.recorded: dict[int, Any] = {}

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
        """Reduce a group of complete buckets; see megatron-core. Replays the reduction if it is recorded."""
        recorded = self.recorded.get(bucket_group[0])
        if recorded is not None and async_op and not outer_fsdp_group_grad_reduce and recorded.launch():
            return True
        whole = self.buffer.unsharded_gradients
        in_place = whole.left_in_place(bucket_group, between_instances=outer_fsdp_group_grad_reduce)
        with in_place if bucket_group[0] in whole.buckets else nullcontext():
            reduced: bool = super()._bucket_group_gradient_reduce(
                bucket_group, async_op=async_op, outer_fsdp_group_grad_reduce=outer_fsdp_group_grad_reduce
            )
        return reduced
