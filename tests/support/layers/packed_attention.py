"""Replace TransformerEngine's attention within packed sequences, and draw random packed sequences.

Each context-parallel rank holds one chunk from the front and one from the back of each sequence.
"""

from copy import deepcopy
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams, pad_packed_seq_params
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


class PackedAttention(torch.nn.Module):
    """Causal attention within each packed sequence; reads offsets only on the device, as graphs require."""

    def __init__(self, config: Any, **unused: Any):
        super().__init__()
        self.group = parallel_state.get_context_parallel_group()
        self.scale = config.kv_channels**-0.5
        self.dropout = torch.nn.Dropout(config.attention_dropout)

    def forward(self, query, key, value, attention_mask, *, packed_seq_params: PackedSeqParams, **unused: Any):
        """Return the attention output, ``[tokens, heads, channels]`` like the inputs."""
        assert attention_mask is None
        ranks, rank = self.group.size(), self.group.rank()
        places = [places_on_rank(packed_seq_params.cu_seqlens_kv, len(key), each, ranks) for each in range(ranks)]
        own, token = places_on_rank(packed_seq_params.cu_seqlens_q, len(query), rank, ranks), torch.cat(places)
        of_query = (own[:, None] >= packed_seq_params.cu_seqlens_q).sum(1)
        of_key = (token[:, None] >= packed_seq_params.cu_seqlens_kv).sum(1)
        hidden = (of_query[:, None] != of_key) | (token > own[:, None])
        if ranks > 1:
            key, value = (gather_from_sequence_parallel_region(each, group=self.group) for each in (key, value))
        scores = torch.einsum("qhc,khc->hqk", query, key) * self.scale
        weights = self.dropout(scores.masked_fill(hidden, -torch.inf).softmax(-1))
        return torch.einsum("hqk,khc->qhc", weights, value)


def with_packed_attention(layer: Any) -> Any:
    """Return the layer spec ``layer`` with ``PackedAttention``."""
    layer = deepcopy(layer)
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return layer


def local_layer(config: Any) -> Any:
    """Return the spec of Megatron's layer with ``PackedAttention``, for ``--spec``."""
    return with_packed_attention(get_gpt_layer_local_spec())


def places_on_rank(offsets: torch.Tensor, tokens: int, rank: int, ranks: int) -> torch.Tensor:
    """Return the positions of a rank's tokens in the full batch of all ranks, int64 ``[tokens]``.

    Args:
        offsets: Start of each sequence, then the end of the last one; lengths are multiples of ``2 * ranks``.
        tokens: Number of tokens on the rank.
        rank: The rank.
        ranks: Number of ranks.
    """
    token = torch.arange(tokens, device=offsets.device)
    if ranks == 1:
        return token
    sequence = (token[:, None] >= offsets[1:] // ranks).sum(1)
    begin = offsets[sequence].long()
    piece = (offsets[sequence + 1] - begin) // (2 * ranks)
    place = token - begin // ranks
    return begin + torch.where(place < piece, rank * piece + place, (2 * ranks - 2 - rank) * piece + place)


def packed_params(tokens: int, sequences: int, generator: torch.Generator, ranks: int = 1) -> PackedSeqParams:
    """Return padded ``PackedSeqParams`` of at most ``sequences`` random lengths with a sum of ``tokens``.

    With several context-parallel ranks, lengths are multiples of ``2 * ranks``.
    """
    count, least = int(torch.randint(1, sequences + 1, (), generator=generator)), 1 if ranks == 1 else 2 * ranks
    inner = (torch.randperm(tokens // least - 1, generator=generator)[: count - 1] + 1).sort().values * least
    offsets = torch.tensor([0, *inner.tolist(), tokens], dtype=torch.int32).cuda()
    longest = int(offsets.diff().max())
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    return pad_packed_seq_params(params, sequences, tokens)


def positions_in_sequences(offsets: torch.Tensor) -> torch.Tensor:
    """Return each token's position in its sequence, int64 ``[tokens]``; the last offset is the number of tokens."""
    token = torch.arange(int(offsets[-1]), device=offsets.device)
    return token - offsets[torch.searchsorted(offsets, token, right=True) - 1]
