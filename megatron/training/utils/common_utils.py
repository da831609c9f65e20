"""Reduce step statistics without synchronizing if the model-parallel group has one rank."""

from typing import TYPE_CHECKING, Any

import torch

from megatron.core import parallel_state
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def logical_and_across_model_parallel_group(input: bool, group: torch.distributed.ProcessGroup | None = None) -> bool:
    """Return whether ``input`` is True on all ranks of ``group``; see megatron-core."""
    return input is True if _is_alone(group) else _upstream.logical_and_across_model_parallel_group(input, group)


def reduce_max_stat_across_model_parallel_group(
    stat: float | torch.Tensor | None, group: torch.distributed.ProcessGroup | None = None
) -> float | torch.Tensor | None:
    """Return the maximum of ``stat`` over ``group``; see megatron-core.

    Args:
        stat: A number, a one-element tensor, or None if this rank has no value.
        group: The process group; None for the model-parallel group.

    Returns:
        A float rounded to float32, or None if no rank has a value. If ``group`` has one rank and ``stat`` is a tensor,
        a float32 tensor of shape (), which synchronizes only when its value is read.
    """
    if not _is_alone(group):
        return _upstream.reduce_max_stat_across_model_parallel_group(stat, group)
    if isinstance(stat, torch.Tensor):
        return stat.detach().to(torch.float32, copy=True).view(())  # a graph may overwrite the original
    return None if stat is None else torch.tensor(float(stat), dtype=torch.float32, device="cpu").item()


def _is_alone(group: torch.distributed.ProcessGroup | None) -> bool:
    return (parallel_state.get_model_parallel_group() if group is None else group).size() == 1
