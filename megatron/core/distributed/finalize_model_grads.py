"""Finalize gradients after the backward passes of a step, without walking all modules in every step.

Gradients of an embedding shared by two pipeline stages are reduced even if they are sharded.
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

# Attributes that megatron-core resets. Routers get them at construction, if at all.
_RESET = ("expert_bias", "reset_global_aux_loss_tracker", "qb_beta_accum")
_routers: WeakKeyDictionary[torch.nn.Module, list[ref[torch.nn.Module]]] = WeakKeyDictionary()


def reset_model_temporary_tensors(config: Any, model: Sequence[torch.nn.Module]) -> None:
    """Reset the per-step statistics of MoE routers; see megatron-core. Each model is searched for routers only once."""
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
    """Sum the gradients of an embedding that the first pipeline stage shares with a later one; see megatron-core.

    Under Megatron-FSDP both stages shard the embedding identically, in a separate bucket, and their shards are summed.
    megatron-core would replace the sharded gradient with its local shard, and would ignore a decoupled gradient.
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
    """Reduce gradients over the GTP weight rematerialization groups, if there are any; see megatron-core.

    Before 0.20, megatron-core collects all process groups in every step to check this.
    """
    groups = (
        parallel_state.get_gtp_weight_remat_group(check_initialized=False),
        parallel_state.get_expert_gtp_weight_remat_group(check_initialized=False),
    )
    if len(args) + len(kwargs) <= 1 and not any(group is not None and group.size() > 1 for group in groups):
        return
    _upstream._allreduce_replicated_grads_over_gtp_remat_group(model, *args, **kwargs)
