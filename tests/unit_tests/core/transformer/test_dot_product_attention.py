"""Test megatron-core's own attention with key and value sizes that differ from the configuration."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

HEADS, SEQUENCE, ROWS = 4, 6, 2


class OneRank:
    """Stand-in for all process groups, with one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    @property
    def tp(self) -> "OneRank":
        return self


class Tracker:
    """Stand-in for the RNG tracker that uses torch's default generator."""

    def fork(self):
        return nullcontext()


class Memory:
    """Stand-in for the global memory buffer that returns uninitialized tensors."""

    def get_tensor(self, shape, dtype, name):
        return torch.empty(shape, dtype=dtype)


def attention(**sizes):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        sequence_parallel=False,
        masked_softmax_fusion=False,
    )
    return DotProductAttention(config, 1, AttnMaskType.causal, "self", pg_collection=OneRank(), **sizes)


@pytest.mark.parametrize("sizes", [{}, {"k_channels": 12, "v_channels": 20}])
def test_heads_have_the_requested_sizes(monkeypatch, sizes):
    monkeypatch.setattr("megatron.core.tensor_parallel.get_cuda_rng_tracker", Tracker)
    monkeypatch.setattr("megatron.core.parallel_state.get_global_memory_buffer", Memory)
    keys, values = sizes.get("k_channels", 8), sizes.get("v_channels", 8)
    query, key = torch.randn(2, SEQUENCE, ROWS, HEADS, keys).unbind()
    value = torch.randn(SEQUENCE, ROWS, HEADS, values)
    later = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    found = attention(**sizes)(query, key, value, later)
    query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    expected = scaled_dot_product_attention(query, key, value, attn_mask=~later)
    torch.testing.assert_close(found, expected.permute(2, 0, 1, 3).flatten(2))
