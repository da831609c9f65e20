"""What follows the backward passes of a step, without work for what a model does not have.

Everything else in this module is megatron-core's.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from megatron.core import parallel_state
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

# What megatron-core resets; a router has them from the start, or never.
_RESET = ("expert_bias", "reset_global_aux_loss_tracker", "qb_beta_accum")
_holders: WeakKeyDictionary[torch.nn.Module, "_Holders"] = WeakKeyDictionary()


class _Holders:
    """Stands for a model of which only some modules are looked at."""

    def __init__(self, modules: Sequence[torch.nn.Module]):
        self._modules = modules

    def __bool__(self) -> bool:
        return bool(self._modules)

    def modules(self) -> Iterator[torch.nn.Module]:
        """Yield these modules."""
        return iter(self._modules)


def reset_model_temporary_tensors(config: Any, model: Sequence[torch.nn.Module]) -> None:
    """Reset what MoE routers collect in a step; see megatron-core. A model's routers are looked up once."""
    for chunk in model:
        if chunk not in _holders:
            found = [module for module in chunk.modules() if any(hasattr(module, name) for name in _RESET)]
            _holders[chunk] = _Holders(found)
    _upstream.reset_model_temporary_tensors(config, [_holders[chunk] for chunk in model if _holders[chunk]])


def _allreduce_replicated_grads_over_gtp_remat_group(
    model: Sequence[torch.nn.Module], *args: Any, **kwargs: Any
) -> None:
    """Reduce gradients over ranks that share weights; see megatron-core, which lists all process groups first.

    From 0.20 on it is given the two that it needs, and lists none.
    """
    groups = (
        parallel_state.get_gtp_weight_remat_group(check_initialized=False),
        parallel_state.get_expert_gtp_weight_remat_group(check_initialized=False),
    )
    if len(args) + len(kwargs) <= 1 and not any(group is not None and group.size() > 1 for group in groups):
        return
    _upstream._allreduce_replicated_grads_over_gtp_remat_group(model, *args, **kwargs)
