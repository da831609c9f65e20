"""Handle main gradients that are unsharded although the strategy shards gradients.

These are expert gradients if each rank has its own experts, and all gradients if an HSDP replica is a single rank.
Micro-batches accumulate in place instead of in new buckets. megatron-core still reduces the accumulated sum after each
micro-batch. Each reduction multiplies the sum by 1 / data-parallel ranks, so earlier micro-batches are scaled
repeatedly. If gradients are communicated in a different dtype, the reduction also adds the sum to itself.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

REDUCES_EVERY_BACKWARD = ("optim_grads", "optim_grads_params")


class UnshardedGradients:
    """Scales the unsharded main gradients of one model once per step, instead of in each reduction of ``buffer``.

    Attributes:
        buckets: The bucket indices of these gradients; empty if not every backward pass reduces gradients.
        fused: The parameters whose gradients accumulate in place, if the model has kernels that write to ``main_grad``.
            Empty with ``no_shard``, where parameters are never gathered.
    """

    def __init__(self, buffer: Any):
        self._buffer = buffer
        self.buckets: set[int] = set()
        self._unscaled: dict[int, tuple[Any, float]] = {}  # main gradients and their factor, by bucket
        self.fused: frozenset[torch.nn.Parameter] = frozenset()
        strategy = buffer.bucketing_policy.data_parallel_sharding_strategy
        if strategy == "no_shard":
            return
        fuses = any(map(_has_fused_kernels, buffer.module.modules()))
        for bucket, group in enumerate(buffer.parameter_groups):
            reduced = group.hfsdp_helper_gbuf or group.main_grad_buffer
            if reduced is None or reduced.is_data_distributed:
                continue
            if fuses:
                self.fused |= frozenset(group.params)
            if strategy in REDUCES_EVERY_BACKWARD:
                self.buckets.add(bucket)
                if reduced.gradient_scaling_factor not in (None, 1.0):
                    self._unscaled[bucket] = reduced, reduced.gradient_scaling_factor
                    reduced.gradient_scaling_factor = None

    def let_kernels_add(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Make fused kernels add to the gradients of ``params``, not overwrite them; skip parameters not in ``fused``.

        Kernels overwrite gradients if megatron-core has set ``overwrite_main_grad`` (TransformerEngine) or
        ``__fsdp_param__`` (Megatron's linear layers).
        """
        for param in self.fused.intersection(params):
            param.overwrite_main_grad = False
            vars(param).pop("__fsdp_param__", None)
            param.main_grad = param.get_main_grad()

    @contextmanager
    def left_in_place(self) -> Iterator[None]:
        """Context manager that disables the gradient communication dtype.

        If that dtype differs from the gradients' dtype, megatron-core's reduction over one rank adds each gradient to
        itself.
        """
        buffer = self._buffer
        policy = buffer.mp_policy
        buffer.mp_policy = replace(policy, grad_comm_dtype=None)
        try:
            yield
        finally:
            buffer.mp_policy = policy

    def scale_bucket(self, bucket: int, grads: torch.Tensor) -> None:
        """Scale ``grads``, the gradients of ``bucket``, if unsharded. Call this before reducing across replicas."""
        if bucket in self._unscaled:
            grads.mul_(self._unscaled[bucket][1])

    def scale(self) -> None:
        """Scale the gradients once per step, after all micro-batches; under HSDP the reduction scales them instead."""
        if self._unscaled and not self._buffer.dist_index.use_hybrid_fsdp:
            main_grads, factors = zip(*self._unscaled.values(), strict=True)
            torch._foreach_mul_([each.data for each in main_grads], factors)


def _has_fused_kernels(module: Any) -> bool:
    """Return whether ``module`` is a Megatron or TransformerEngine linear layer with fused kernels."""
    return any(getattr(module, name, False) for name in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"))
