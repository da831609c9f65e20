"""Create optimizer states for empty shards.

Megatron-FSDP gives an empty shard no gradient, and torch's optimizers create states at a parameter's first gradient.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate


def state_of_every_parameter(
    optimizer: torch.optim.Optimizer, states: dict[Any, dict[str, Any]], name_of: Callable[[torch.Tensor], Hashable]
) -> dict[Any, dict[str, Any]]:
    """Return ``states`` plus states for parameters with an empty local shard; call this on all ranks that shard them.

    States are in the order of the optimizer's parameters: megatron-core runs collectives for one state after another,
    so all ranks need the same order. An empty shard gets no gradients, so its step count and other unsharded values do
    not advance. Any rank may save these values, so they are copied from a nonempty shard, if necessary on another rank.

    Args:
        optimizer: The optimizer, with ``DTensor`` parameters.
        states: Its states, keyed by the names that ``name_of`` returns; not modified.
    """
    params = [param for group in optimizer.param_groups for param in group["params"] if isinstance(param, DTensor)]
    named = {name_of(param): param for param in params}
    empty = {name: param for name, param in named.items() if not param._local_tensor.numel()}
    model = next((_described(state) for name, state in states.items() if name not in empty and state), None)
    model = _of_any_rank(model, params[0]) if params else model
    if model is None:  # no step yet
        return states
    every = states | {name: _like(model, param) for name, param in empty.items()}
    return {name: every[name] for name in named if name in every} | every


def _described(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` with each sharded value replaced by its dtype."""
    return {name: value.dtype if isinstance(value, DTensor) else value for name, value in state.items()}


def _of_any_rank(model: dict[str, Any] | None, param: DTensor) -> dict[str, Any] | None:
    """Return ``model``, a result of ``_described``; if it is None, the ``model`` of a different rank.

    All ranks that shard ``param`` must call this.
    """
    for dim, placement in enumerate(param.placements):
        if not isinstance(placement, Replicate):
            group = param.device_mesh.get_group(dim)
            models: list[dict[str, Any] | None] = [None] * group.size()
            dist.all_gather_object(models, model, group=group)
            model = model or next(filter(None, models), None)
    return model


def _like(model: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return states for ``param`` like ``model``: an empty tensor for each dtype, and copies of other values."""
    return {
        name: torch.zeros_like(param, dtype=value, requires_grad=False)
        if isinstance(value, torch.dtype)
        else value.clone()
        if torch.is_tensor(value)
        else value
        for name, value in model.items()
    }
