"""Main gradients that a rank has whole though gradients are sharded: its own reduction leaves them as they are.

They are those of experts where each rank has experts of its own, and all gradients where an instance of hybrid sharding
is one rank. Micro-batches accumulate in place, with no bucket that is new each time and then added to a shard. Still,
megatron-core reduces them after each micro-batch: it multiplies them by 1 / data-parallel ranks, the earlier ones again
with each later, and where gradients are communicated in another dtype it adds them to themselves.
"""

from collections.abc import Iterator
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
    """

    def __init__(self, buffer: Any):
        self._buffer = buffer
        self.buckets: set[int] = set()
        self._main_grads: list[Any] = []
        self._factors: list[float] = []
        if buffer.bucketing_policy.data_parallel_sharding_strategy not in REDUCES_EVERY_BACKWARD:
            return
        for bucket, group in enumerate(buffer.parameter_groups):
            reduced = group.hfsdp_helper_gbuf or group.main_grad_buffer
            if reduced is None or reduced.is_data_distributed:
                continue
            self.buckets.add(bucket)
            # Where the collective itself averages the factor is not used.
            if reduced.gradient_scaling_factor not in (None, 1.0) and not buffer.ddp_config.average_in_collective:
                self._main_grads.append(group.main_grad_buffer)
                self._factors.append(reduced.gradient_scaling_factor)
                reduced.gradient_scaling_factor = None

    @contextmanager
    def left_in_place(self, between_instances: bool) -> Iterator[None]:
        """Meanwhile a reduction does not add gradients that are communicated in another dtype to themselves.

        Args:
            between_instances: Whether it goes on between instances, in that dtype: then the rounded gradients take the
                place of those that have accumulated, as with the strategy ``optim``. Otherwise there are none.
        """
        buffer = self._buffer
        config, policy = buffer.ddp_config, buffer.mp_policy
        if between_instances:
            buffer.ddp_config = replace(config, data_parallel_sharding_strategy="optim")
        else:
            buffer.mp_policy = replace(policy, grad_comm_dtype=None)
        try:
            yield
        finally:
            buffer.ddp_config, buffer.mp_policy = config, policy

    def scale(self) -> None:
        """Scale them, once in a step. All its micro-batches must have been reduced."""
        if self._main_grads:
            torch._foreach_mul_([main_grads.data for main_grads in self._main_grads], self._factors)
