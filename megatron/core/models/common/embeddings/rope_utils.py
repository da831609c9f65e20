"""Rotary embeddings that graphs can divide among context-parallel ranks: by views, not by indices from the host."""

from typing import Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


def get_pos_emb_on_this_cp_rank(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
    """Return the two pieces of positional embeddings that this context-parallel rank has; see megatron-core.

    Args:
        pos_emb: The embeddings of whole sequences.
        seq_dim: Their dimension of tokens, which is cut into twice as many pieces as there are ranks.
        cp_group: The ranks.

    Raises:
        ValueError: there is no ``cp_group``.
        RuntimeError: the pieces would not have one length.
    """
    if cp_group is None:  # an error of megatron-core's
        return _upstream.get_pos_emb_on_this_cp_rank(pos_emb, seq_dim, cp_group)
    pieces, rank = 2 * cp_group.size(), cp_group.rank()
    cut = pos_emb.unflatten(seq_dim, (pieces, -1))
    return torch.cat([cut.select(seq_dim, piece) for piece in (rank, pieces - 1 - rank)], seq_dim)
