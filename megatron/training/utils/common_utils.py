"""Statistics of a step, taken without the host waiting for the device where nothing is to be reduced."""

from typing import TYPE_CHECKING, Any

import torch

from megatron.core import parallel_state
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def logical_and_across_model_parallel_group(input: bool, group: torch.distributed.ProcessGroup | None = None) -> bool:
    """Return whether ``input`` is True on all ranks of ``group``; see megatron-core."""
    if not _has_other_ranks(group):
        return input is True
    return _upstream.logical_and_across_model_parallel_group(input, group)


def reduce_max_stat_across_model_parallel_group(
    stat: float | torch.Tensor | None, group: torch.distributed.ProcessGroup | None = None
) -> float | torch.Tensor | None:
    """Return the largest ``stat`` of the ranks of ``group``; see megatron-core.

    Args:
        stat: A number, a tensor of one element, or None if this rank has none.
        group: The ranks; None for the model-parallel ones.

    Returns:
        A float, rounded to float32; None if no rank has one. If ``group`` is this rank alone and ``stat`` a tensor, a
        float32 tensor of no dimension: the host waits for it only once its value is asked for.
    """
    if not _has_other_ranks(group):
        if isinstance(stat, torch.Tensor):
            return stat.detach().to(torch.float32, copy=True).view(())  # a graph may write to the original again
        value = -1.0 if stat is None else torch.tensor(float(stat), dtype=torch.float32, device="cpu").item()
        return None if value == -1.0 else value
    return _upstream.reduce_max_stat_across_model_parallel_group(stat, group)


def _has_other_ranks(group: torch.distributed.ProcessGroup | None) -> bool:
    group = parallel_state.get_model_parallel_group() if group is None else group
    return group.size() > 1
