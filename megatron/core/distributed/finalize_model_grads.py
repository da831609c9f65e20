"""What follows the backward passes of a step, without work for what a model does not have.

The gradients of an embedding that two pipeline stages have are reduced where they are sharded, too.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.distributed.tensor import DTensor

from megatron.core import parallel_state
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

# What megatron-core resets; a router has them from the start, or never.
_RESET = ("expert_bias", "reset_global_aux_loss_tracker", "qb_beta_accum")
_routers: WeakKeyDictionary[torch.nn.Module, list[ref[torch.nn.Module]]] = WeakKeyDictionary()


def reset_model_temporary_tensors(config: Any, model: Sequence[torch.nn.Module]) -> None:
    """Reset what MoE routers collect in a step; see megatron-core. A model's routers are looked up once."""
    for chunk in model:
        if chunk not in _routers:
            found = (module for module in chunk.modules() if any(hasattr(module, name) for name in _RESET))
            _routers[chunk] = [ref(module) for module in found]
    alive = (router() for chunk in model for router in _routers[chunk])
    routers = [router for router in alive if router is not None]
    _upstream.reset_model_temporary_tensors(config, [SimpleNamespace(modules=lambda: routers)])


def _allreduce_embedding_grad(
    model: Sequence[torch.nn.Module],
    embd_group: Any,
    pp_group: Any,
    weight_getter: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Add up the gradients of an embedding that the first and another pipeline stage have; see megatron-core.

    Under Megatron-FSDP both shard it alike, in a bucket of its own, and megatron-core adds up their shards. It would
    leave the shard in the place of the sharded gradient then, and find no gradient that is decoupled.
    """

    def gradient_of(module: torch.nn.Module) -> Any:
        weight = weight_getter(module)
        gradient = getattr(weight, "decoupled_grad", None)
        gradient = getattr(weight, "grad", None) if gradient is None else gradient
        return SimpleNamespace(grad=gradient) if isinstance(gradient, DTensor) else weight

    _upstream._allreduce_embedding_grad(model, embd_group, pp_group, gradient_of, *args, **kwargs)


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
