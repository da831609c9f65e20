"""Optimizer states of parameters that have no element on this rank.

Megatron-FSDP gives such a shard no gradient, and torch's optimizers make states at a parameter's first gradient.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate


def state_of_every_parameter(
    optimizer: torch.optim.Optimizer, states: dict[Any, dict[str, Any]], name_of: Callable[[torch.Tensor], Hashable]
) -> dict[Any, dict[str, Any]]:
    """Return ``states`` with those of parameters whose local shard is empty.

    They come in the order of the optimizer's parameters, which is the same on all ranks, whichever shards are empty:
    megatron-core runs collectives for one state after another.

    Values that are not sharded, such as a number of steps, are those of another parameter, on this rank or on one that
    holds other shards: an optimizer does not advance them without a gradient, and any rank's may be the one that is
    saved.

    All ranks that share the optimizer's shards must call it at the same time.

    Args:
        optimizer: The optimizer, with ``DTensor`` parameters.
        states: Its states, by parameter name; not changed.
    """
    params = [param for group in optimizer.param_groups for param in group["params"] if isinstance(param, DTensor)]
    named = {name_of(param): param for param in params}
    empty = {name: param for name, param in named.items() if not param._local_tensor.numel()}
    model = next((_described(state) for name, state in states.items() if name not in empty and state), None)
    model = _of_any_rank(model, params[0]) if params else model
    if model is None:  # no step yet
        return states
    every = states | {name: _like(model, param, states.get(name, {})) for name, param in empty.items()}
    return {name: every[name] for name in named if name in every} | every


def _described(state: dict[str, Any]) -> dict[str, Any]:
    """The dtype of each value that is sharded, and each other value."""
    return {name: value.dtype if isinstance(value, DTensor) else value for name, value in state.items()}


def _of_any_rank(model: dict[str, Any] | None, param: DTensor) -> dict[str, Any] | None:
    """Return ``model``, or that of a rank that holds other shards of ``param`` if this one has none."""
    for dim, placement in enumerate(param.placements):
        if not isinstance(placement, Replicate):
            group = param.device_mesh.get_group(dim)
            models: list[dict[str, Any] | None] = [None] * group.size()
            dist.all_gather_object(models, model, group=group)
            model = model or next(filter(None, models), None)
    return model


def _like(model: dict[str, Any], param: torch.Tensor, own: dict[str, Any]) -> dict[str, Any]:
    def value_of(name: str) -> Any:
        value = model[name]
        if not isinstance(value, torch.dtype):
            return value.clone() if torch.is_tensor(value) else value
        return own[name] if name in own else torch.zeros_like(param, dtype=value, requires_grad=False)

    return {name: value_of(name) for name in model}
