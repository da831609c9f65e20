"""Skip the broadcast of a batch if the tensor-parallel group has one rank."""

from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def get_batch_on_this_tp_rank(
    batch: dict[str, torch.Tensor], *args: Any, **kwargs: Any
) -> dict[str, torch.Tensor | None]:
    """Broadcast the batch from the first tensor-parallel rank and return it; see megatron-core.

    Skip the broadcasts if ``broadcast_group`` has one rank and this rank reads all of ``batch``. Even with one rank,
    each broadcast costs host time right before the forward pass.
    """
    group = kwargs.get("broadcast_group")
    reads_all = kwargs.get("pipeline_model_parallel_size", 1) == 1 or kwargs.get("mtp_on_this_rank")
    if reads_all and group is not None and group.size() == 1:
        return batch
    return _upstream.get_batch_on_this_tp_rank(batch, *args, **kwargs)
