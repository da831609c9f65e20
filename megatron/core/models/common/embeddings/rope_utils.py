"""Split rotary embeddings among context-parallel ranks with views: captures cannot copy indices from the host."""

from typing import Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


def get_pos_emb_on_this_cp_rank(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
    """Return this context-parallel rank's two chunks of the positional embeddings; see megatron-core.

    Args:
        pos_emb: The embeddings of the whole sequence.
        seq_dim: The sequence dimension, which is split into two chunks per rank.
        cp_group: The context-parallel group.

    Raises:
        RuntimeError: The sequence length is not divisible by the number of chunks.
        ValueError: ``cp_group`` is None.
    """
    if cp_group is None:
        return _upstream.get_pos_emb_on_this_cp_rank(pos_emb, seq_dim, cp_group)  # raises the error
    pieces, rank = 2 * cp_group.size(), cp_group.rank()
    split = pos_emb.unflatten(seq_dim, (pieces, -1))
    return torch.cat([split.select(seq_dim, piece) for piece in (rank, pieces - 1 - rank)], seq_dim)
