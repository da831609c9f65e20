"""Experts that compute all their tokens at once with ``--moe-use-grouped-tensor``; parameters stay what they are."""

from typing import Any

import torch

from megatron.core.transformer._cuda_graphs.flags.options import grouped_tensor
from megatron.core.transformer.moe.grouped_tensor import compute_experts, linears, run_pre_hooks
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


class TEGroupedMLP(_upstream.TEGroupedMLP):
    """megatron-core's ``TEGroupedMLP``, whose tokens per expert may be known to the device only."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.calls_no_inner_modules = grouped_tensor(self.config)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the experts; arguments and result are megatron-core's."""
        if not self.calls_no_inner_modules:
            return super().forward(*args, **kwargs)
        run_pre_hooks(self)
        fc1, fc2 = (linears([layer], range(self.num_local_experts)) for layer in (self.linear_fc1, self.linear_fc2))
        return compute_experts(self.config, self.activation_func, fc1, fc2, *args, **kwargs)


class SequentialMLP(_upstream.SequentialMLP):
    """megatron-core's ``SequentialMLP``, whose tokens per expert may be known to the device only."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.calls_no_inner_modules = grouped_tensor(self.config)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the experts; arguments and result are megatron-core's."""
        if not self.calls_no_inner_modules:
            return super().forward(*args, **kwargs)
        run_pre_hooks(self)
        fc1 = linears([expert.linear_fc1 for expert in self.local_experts])
        fc2 = linears([expert.linear_fc2 for expert in self.local_experts])
        return compute_experts(self.config, self.local_experts[0].activation_func, fc1, fc2, *args, **kwargs)
