"""Optimizer states of parameters that have no element on this rank.

Megatron-FSDP gives such a shard no gradient, and torch's optimizers make states at a parameter's first gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def state_of_every_parameter(
    optimizer: torch.optim.Optimizer, states: dict[Any, dict[str, Any]], name_of: Callable[[torch.Tensor], str]
) -> dict[Any, dict[str, Any]]:
    """Return ``states`` with those of parameters whose local shard is empty.

    Values that are not sharded, such as a number of steps, are those of another parameter: an optimizer
    does not advance them without a gradient, and any rank's may be the one that is saved.

    Args:
        optimizer: The optimizer, with ``DTensor`` parameters.
        states: Its states, by parameter name; not changed.
        name_of: Returns a parameter's name.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    empty = [param for param in params if isinstance(param, DTensor) and not param._local_tensor.numel()]
    names = [name_of(param) for param in empty]
    model = next((state for name, state in states.items() if name not in names and state), None)
    if model is None:  # no step yet
        return states
    return states | {name: _like(model, param, states.get(name, {})) for name, param in zip(names, empty, strict=True)}


def _like(model: dict[str, Any], param: torch.Tensor, own: dict[str, Any]) -> dict[str, Any]:
    def value_of(name: str) -> Any:
        value = model[name]
        if not isinstance(value, DTensor):
            return value.clone() if torch.is_tensor(value) else value
        return own[name] if name in own else torch.zeros_like(param, dtype=value.dtype, requires_grad=False)

    return {name: value_of(name) for name in model}
