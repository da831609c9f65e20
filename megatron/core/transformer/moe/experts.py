"""Expert modules that compute all experts at once with ``--moe-use-grouped-tensor``."""

from typing import Any

import torch

from megatron.core.transformer._cuda_graphs.flags.options import grouped_tensor
from megatron.core.transformer.moe.grouped_tensor import compute_experts, linears, run_pre_hooks
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


class _GroupedExperts:
    """Mixin for expert modules that computes all experts at once with ``--moe-use-grouped-tensor``."""

    config: Any
    num_local_experts: int

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.calls_no_inner_modules = grouped_tensor(self.config)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the experts; see megatron-core."""
        if not self.calls_no_inner_modules:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        mlps: Any = getattr(self, "local_experts", [self])
        run_pre_hooks(self, mlps[0].activation_func)
        numbers = None if hasattr(self, "local_experts") else range(self.num_local_experts)
        fc1, fc2 = (linears([getattr(mlp, name) for mlp in mlps], numbers) for name in ("linear_fc1", "linear_fc2"))
        return compute_experts(self.config, mlps[0].activation_func, fc1, fc2, *args, **kwargs)


class TEGroupedMLP(_GroupedExperts, _upstream.TEGroupedMLP):
    """Extends megatron-core's ``TEGroupedMLP`` to keep token counts on the GPU."""


class SequentialMLP(_GroupedExperts, _upstream.SequentialMLP):
    """Extends megatron-core's ``SequentialMLP`` to compute all experts at once."""
