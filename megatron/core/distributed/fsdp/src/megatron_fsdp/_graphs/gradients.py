"""The gradients of one ``MegatronFSDP``: moved to their buckets as they complete, and reduced."""

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import torch

from ..param_and_grad_buffer import _check_nan_in_grad, to_local_if_dtensor
from ..unsharded_gradients import REDUCES_EVERY_BACKWARD
from .registry import Registry


class Progress(IntEnum):
    """How far the gradients of a step are."""

    REPLAYED = 0  # all of them, by graphs of the whole model
    ACCUMULATED = 1
    REDUCED = 2  # by a backward pass


class Gradients:
    """Accumulates and reduces the gradients of one ``MegatronFSDP``, and knows which are still to come.

    Attributes:
        awaited: Parameters whose gradient the open backward pass has not handled yet.
        progress: How far they are since the last step.
        final: Whether the last backward pass knew that it is a step's last, and reduced what no other does.
    """

    def __init__(self, fsdp: Any, registry: Registry):
        self._fsdp, self._registry = fsdp, registry
        self.awaited: set[torch.nn.Parameter] = set()
        self.progress = Progress.ACCUMULATED
        self.final = False

    @property
    def between_instances(self) -> bool:
        """Whether each reduction goes on between instances of hybrid sharding now: those in graphs never do."""
        return self._is_last() and not self._registry.records_reductions

    def reduce_between_instances(self) -> None:
        """Called at the end of a backward pass: if it is a step's last, reduce what its reductions have left to it.

        Ranks whose pass a graph replayed and those where it ran eagerly do so in one order.
        """
        if self._registry.records_reductions and self._registry.captured is None:
            self.final = self._is_last()
            if self.final:
                self._fsdp.grad_reduce_pipeline.reduce_all_between_instances()

    def _is_last(self) -> bool:
        """Whether the backward pass is known to be its step's last."""
        return getattr(self._fsdp, "is_last_microbatch", False) or self._fsdp.model_auto_sync

    def expect(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Await the gradients of ``params``, and no others."""
        self.awaited = set(params)
        for param in self.awaited:
            param.grad_added_to_main_grad = False

    @torch.compiler.disable
    def handle(self, params: list[torch.nn.Parameter]) -> None:
        """Move the complete gradients of ``params`` to their buckets and reduce the buckets that are complete.

        Gradients of shared parameters are left to the end of the backward pass: only then are they complete.

        Raises:
            RuntimeError: a weight gradient is delayed, and nothing will accumulate it.
        """
        if not params:
            return
        params = [param for param in params if not getattr(param, "_is_shared", False)]
        for param in params:
            if getattr(param, "skip_backward_post_hook", False) and not hasattr(param, "post_wgrad_grad_acc_hook"):
                raise RuntimeError(
                    f"{self._fsdp.param_to_name[param]} has a delayed weight gradient but no hook to accumulate it"
                )
        if params:
            self._accumulate_and_reduce(params)
            self.awaited.difference_update(params)

    def handle_rest(self, params: Iterable[torch.nn.Parameter]) -> bool:
        """Handle those of ``params`` whose gradient is awaited, complete or not; return whether they are reduced."""
        rest = sorted(self.awaited.intersection(params), key=self._fsdp.param_to_name.__getitem__)
        self.awaited.difference_update(rest)
        return self._accumulate_and_reduce(rest)

    def check_final(self) -> None:
        """Make sure that the step's last backward pass knew that it is.

        Raises:
            RuntimeError: it did not, and left gradients unreduced.
        """
        fsdp = self._fsdp
        waits = fsdp.dist_index.use_hybrid_fsdp or fsdp.data_parallel_sharding_strategy not in REDUCES_EVERY_BACKWARD
        if waits and fsdp.microbatch_count and not self.final:
            raise RuntimeError(
                "Megatron-FSDP reduces these gradients in the backward pass of a step's last micro-batch only, and the "
                "pipeline schedule did not say which that is: it does if config.grad_sync_func is None, as with "
                "--no-align-grad-reduce"
            )

    def _accumulate_and_reduce(self, params: list[torch.nn.Parameter]) -> bool:
        """Accumulate each gradient, then reduce them if this pass reduces; return whether it does."""
        fsdp = self._fsdp
        self.final = getattr(fsdp, "is_last_microbatch", False) or fsdp.model_auto_sync
        reduces = self.final or fsdp.data_parallel_sharding_strategy in REDUCES_EVERY_BACKWARD
        self.progress = max(Progress.REDUCED if reduces else Progress.ACCUMULATED, self.progress)
        self.accumulate(params)
        if reduces:
            fsdp.grad_reduce_pipeline.reduce_gradients(
                params,
                suggested_queue_capacity=fsdp.suggested_RS_queue_capacity,
                outer_fsdp_group_grad_reduce=fsdp.dist_index.use_hybrid_fsdp and self.between_instances,
            )
        return reduces

    def accumulate(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Add each gradient to its main gradient, unless a fused kernel has done so already."""
        buffer = self._fsdp.param_and_grad_buffer
        copied_to, copied_from = [], []
        claimed: dict[int, Any] = {}
        for param in params:
            bucket = buffer.param_to_param_group[param]
            group = buffer.parameter_groups[bucket]
            if not group.requires_grad:
                continue
            sharded = (group.hfsdp_helper_gbuf or group.main_grad_buffer).is_data_distributed
            if not param.grad_added_to_main_grad and (sharded or param.grad is not None):
                if param.grad is not None and self._fsdp.report_nan_in_param_grad:
                    _check_nan_in_grad(to_local_if_dtensor(param.grad))
                main_grad = self._claim_main_grad(param, bucket, claimed)
                if param.grad is None:
                    main_grad.zero_()
                elif sharded:  # the bucket is new in every backward pass; the reduction adds to the shard
                    copied_to.append(main_grad)
                    copied_from.append(to_local_if_dtensor(param.grad))
                else:
                    main_grad.add_(to_local_if_dtensor(param.grad))
            if param.grad is not None:
                del param.grad
            param.grad_added_to_main_grad = False
        if copied_to:
            torch._foreach_copy_(copied_to, copied_from)

    def _claim_main_grad(self, param: torch.nn.Parameter, bucket: int, claimed: dict[int, Any]) -> torch.Tensor:
        """Return ``param.main_grad``, a view of its bucket for this backward pass.

        Args:
            claimed: The storage of each bucket that the caller has claimed already, by index.
        """
        main_grads = param._gbuf
        if bucket in claimed:
            item = main_grads.get_item_from_bucket(claimed[bucket], param._item_id)
            param.main_grad = item.view(to_local_if_dtensor(param).shape)
        else:
            param.main_grad = param.get_main_grad()
            dtype = self._fsdp.mp_policy.grad_comm_dtype if main_grads.is_data_distributed else None
            claimed[bucket] = main_grads.fetch_bucket(dtype=dtype)
        return param.main_grad

    def drop(self) -> None:
        """Drop the gradients of a backward pass that did not come to its end."""
        self.awaited.clear()
        for param in self._fsdp.raw_param.values():
            param.grad = None
            param.grad_added_to_main_grad = False
        for ready in self._fsdp.grad_reduce_pipeline.bucket_grad_ready_params:
            ready.clear()
        self._fsdp.grad_reduce_pipeline.reset()
