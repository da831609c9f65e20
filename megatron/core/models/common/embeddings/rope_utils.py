"""Rotary embeddings that graphs can split among context-parallel ranks: by views, not by indices from the host."""

from typing import Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


def get_pos_emb_on_this_cp_rank(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
    """Return the two pieces of positional embeddings of this context-parallel rank; see megatron-core.

    Args:
        pos_emb: The embeddings of whole sequences.
        seq_dim: Their token dimension, which is split into twice as many pieces as there are ranks.
        cp_group: The ranks.

    Raises:
        RuntimeError: the pieces would differ in length.
    """
    pieces, rank = 2 * cp_group.size(), cp_group.rank()
    split = pos_emb.unflatten(seq_dim, (pieces, -1))
    return torch.cat([split.select(seq_dim, piece) for piece in (rank, pieces - 1 - rank)], seq_dim)
