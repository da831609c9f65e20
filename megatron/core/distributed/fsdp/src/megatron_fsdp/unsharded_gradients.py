"""Main gradients that a rank has whole though gradients are sharded: its own reduction leaves them as they are.

They are those of experts where each rank has experts of its own, and all gradients where an instance of hybrid sharding
is one rank. Micro-batches accumulate in place, with no bucket that is new each time and then added to a shard. Still,
megatron-core reduces them after each micro-batch: it multiplies them by 1 / data-parallel ranks, the earlier ones again
with each later, and where gradients are communicated in another dtype it adds them to themselves.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

REDUCES_EVERY_BACKWARD = ("optim_grads", "optim_grads_params")


class UnshardedGradients:
    """The whole main gradients of one model.

    Args:
        buffer: The model's ``ParamAndGradBuffer``, whose reductions do not scale them from now on.

    Attributes:
        buckets: The indices of the buckets that they fill.
        fused: The parameters whose gradients accumulate in place over micro-batches, in models with kernels that write
            gradients of weights to ``main_grad`` (``--gradient-accumulation-fusion``). None with ``no_shard``, where
            nothing is gathered.
    """

    def __init__(self, buffer: Any):
        self._buffer = buffer
        self.buckets: set[int] = set()
        self._unscaled: dict[int, tuple[Any, float]] = {}  # main gradients and their factor, by bucket
        self.fused: frozenset[torch.nn.Parameter] = frozenset()
        strategy = buffer.bucketing_policy.data_parallel_sharding_strategy
        if strategy != "no_shard" and any(map(_has_fused_kernels, buffer.module.modules())):
            groups = [group for group in buffer.parameter_groups if group.requires_grad]
            in_place = [g for g in groups if not (g.hfsdp_helper_gbuf or g.main_grad_buffer).is_data_distributed]
            self.fused = frozenset(param for group in in_place for param in group.params)
        if strategy not in REDUCES_EVERY_BACKWARD:
            return
        for bucket, group in enumerate(buffer.parameter_groups):
            reduced = group.hfsdp_helper_gbuf or group.main_grad_buffer
            if reduced is None or reduced.is_data_distributed:
                continue
            self.buckets.add(bucket)
            if reduced.gradient_scaling_factor not in (None, 1.0):
                self._unscaled[bucket] = reduced, reduced.gradient_scaling_factor
                reduced.gradient_scaling_factor = None

    def let_kernels_add(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Let fused kernels add to those of ``params`` that accumulate.

        megatron-core marks the parameters that it gathers, and kernels overwrite the gradients of marked ones: those of
        TransformerEngine by one mark, Megatron's own linear layers by the other.
        """
        for param in self.fused.intersection(params):
            param.overwrite_main_grad = False
            vars(param).pop("__fsdp_param__", None)
            param.main_grad = param.get_main_grad()

    @contextmanager
    def left_in_place(self) -> Iterator[None]:
        """Meanwhile a reduction within an instance, of one rank, does not add them to themselves in another dtype."""
        buffer = self._buffer
        policy = buffer.mp_policy
        buffer.mp_policy = replace(policy, grad_comm_dtype=None)
        try:
            yield
        finally:
            buffer.mp_policy = policy

    def scale_bucket(self, bucket: int, grads: torch.Tensor) -> None:
        """Scale ``grads``, those of ``bucket`` as they are sent to other instances, if a rank has them whole."""
        if bucket in self._unscaled:
            grads.mul_(self._unscaled[bucket][1])

    def scale(self) -> None:
        """Scale them, once in a step, unless instances have. All its micro-batches must have been reduced."""
        if self._unscaled and not self._buffer.dist_index.use_hybrid_fsdp:
            main_grads, factors = zip(*self._unscaled.values(), strict=True)
            torch._foreach_mul_([each.data for each in main_grads], factors)


def _has_fused_kernels(module: Any) -> bool:
    """Whether ``module`` is a linear layer of Megatron, or of TransformerEngine, with such kernels."""
    return any(getattr(module, name, False) for name in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"))
