"""Attention within packed sequences, in the place of TransformerEngine's, and the sequences of a micro-batch."""

from copy import deepcopy
from typing import Any

import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams, pad_packed_seq_params


class PackedAttention(torch.nn.Module):
    """Causal attention within each packed sequence; reads offsets on the device alone, as graphs must."""

    def __init__(self, config: Any, **unused: Any):
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.dropout = torch.nn.Dropout(config.attention_dropout)

    def forward(self, query, key, value, attention_mask, *, packed_seq_params: PackedSeqParams, **unused: Any):
        """Return ``[tokens, heads, channels]`` for inputs of that shape."""
        assert attention_mask is None
        token = torch.arange(len(query), device=query.device)
        of_query = (token[:, None] >= packed_seq_params.cu_seqlens_q).sum(1)
        of_key = (token[:, None] >= packed_seq_params.cu_seqlens_kv).sum(1)
        hidden = (of_query[:, None] != of_key) | (token > token[:, None])
        scores = torch.einsum("qhc,khc->hqk", query, key) * self.scale
        weights = self.dropout(scores.masked_fill(hidden, -torch.inf).softmax(-1))
        return torch.einsum("hqk,khc->qhc", weights, value)


def with_packed_attention(layer: Any) -> Any:
    """Return the spec ``layer`` of a layer with this attention."""
    layer = deepcopy(layer)
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return layer


def local_layer(config: Any) -> Any:
    """Megatron's own layer with this attention; for ``--spec tests.support.packed_attention local_layer``."""
    return with_packed_attention(get_gpt_layer_local_spec())


def packed_params(tokens: int, sequences: int, generator: torch.Generator) -> PackedSeqParams:
    """Return parameters of up to ``sequences`` sequences of random lengths, ``tokens`` in all, padded."""
    count = int(torch.randint(1, sequences + 1, (), generator=generator))
    inner = (torch.randperm(tokens - 1, generator=generator)[: count - 1] + 1).sort().values
    offsets = torch.tensor([0, *inner.tolist(), tokens], dtype=torch.int32).cuda()
    longest = int(offsets.diff().max())
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    return pad_packed_seq_params(params, sequences, tokens)


def positions_in_sequences(offsets: torch.Tensor) -> torch.Tensor:
    """Return each token's place in its sequence, int64 ``[tokens]``, for offsets that end with the number of tokens."""
    token = torch.arange(int(offsets[-1]), device=offsets.device)
    return token - offsets[torch.searchsorted(offsets, token, right=True) - 1]
