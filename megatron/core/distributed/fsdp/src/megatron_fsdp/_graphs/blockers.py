"""Why passes cannot be recorded with their collectives: predicates and reasons."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .context import Context
from .gradient_sink import has_gradient_hooks
from .unit import Unit

COLLECTIVES_STAY_OUTSIDE = (
    "its collectives cannot be in graphs (that needs --data-parallel-sharding-strategy optim_grads_params, "
    "--fsdp-double-buffer, and no NCCL_GRAPH_MIXING_SUPPORT=0)"
)
# What must be true of no parameter, and the reason. The last does not rule out the whole model, which completes them.
_OF_PARAMETERS: Sequence[tuple[Any, str]] = (
    (has_gradient_hooks, "parameter {} has hooks"),
    (lambda param: getattr(param, "skip_backward_post_hook", False), "the weight gradient of {} is delayed"),
    (lambda param: getattr(param, "_is_shared", False), "the gradient of {} is completed elsewhere"),
)


def layers_blocker(context: Context, layers: Iterable[torch.nn.Module]) -> str:
    """Say why the passes of ``layers`` cannot be recorded with their collectives; empty if they can."""
    units = [context.units.get(layer) for layer in layers]
    return _blocker(context, units, [param for unit in units if unit for param in unit.params], _OF_PARAMETERS)


def model_blocker(context: Context, trainable: Iterable[torch.nn.Parameter]) -> str:
    """Say why the whole model's passes cannot be graphs, ``trainable`` being its parameters; empty if they can."""
    if context.fsdp.model_auto_sync:
        return "Megatron-FSDP synchronizes the model in every micro-batch"
    return _blocker(context, list(context.units.values()) or [None], trainable, _OF_PARAMETERS[:-1])


def _blocker(
    context: Context, units: Iterable[Unit | None], params: Iterable[torch.nn.Parameter], reasons: Sequence[Any]
) -> str:
    if not all(unit is not None and context.plans.records(unit) for unit in units):
        return COLLECTIVES_STAY_OUTSIDE
    for param in params:
        for applies, reason in reasons:
            if applies(param):
                return str(reason.format(context.fsdp.param_to_name[param]))
    return ""
