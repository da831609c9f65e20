"""A batch that no rank but one needs is not broadcast.

Everything else in this module is megatron-core's.
"""

from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def get_batch_on_this_tp_rank(
    batch: dict[str, torch.Tensor],
    has_cu_seqlens: bool,
    is_hybrid_cp: bool,
    create_attention_mask_in_dataloader: bool,
    broadcast_src_rank: int,
    broadcast_group: torch.distributed.ProcessGroup | None,
    cp_size: int,
    tp_rank: int,
    micro_batch_size: int,
    seq_length: int,
    mtp_on_this_rank: bool,
    pipeline_model_parallel_size: int = 1,
    is_pipeline_first_stage: bool = False,
    is_pipeline_last_stage: bool = False,
) -> dict[str, torch.Tensor | None]:
    """Return the batch of a micro-batch, broadcast from the first tensor-parallel rank; see megatron-core.

    A rank that is alone in ``broadcast_group`` and reads all of ``batch`` gets it back: each broadcast costs the host
    as much as a collective between ranks does, right before the forward pass.
    """
    reads_all = pipeline_model_parallel_size == 1 or mtp_on_this_rank
    if reads_all and broadcast_group is not None and broadcast_group.size() == 1:
        return batch
    read: dict[str, torch.Tensor | None] = _upstream.get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens,
        is_hybrid_cp,
        create_attention_mask_in_dataloader,
        broadcast_src_rank,
        broadcast_group,
        cp_size,
        tp_rank,
        micro_batch_size,
        seq_length,
        mtp_on_this_rank,
        pipeline_model_parallel_size,
        is_pipeline_first_stage,
        is_pipeline_last_stage,
    )
    return read
