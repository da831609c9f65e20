"""Replace TransformerEngine's context-parallel attention with one that gathers all keys and values."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


class GatheringAttention(torch.nn.Module):
    """Causal attention; each rank holds one chunk from the front and one from the back of the sequence."""

    def __init__(self, config: Any, **unused: Any):
        super().__init__()
        self.group = parallel_state.get_context_parallel_group()
        self.scale = config.kv_channels**-0.5
        self.dropout = torch.nn.Dropout(config.attention_dropout)

    def forward(self, query, key, value, attention_mask, **unused: Any):
        """Return ``[tokens, sequences, heads x channels]`` for inputs of ``[tokens, sequences, heads, channels]``."""
        tokens, sequences = query.shape[:2]
        position = self._gathered(torch.arange(tokens * self.group.size(), device=query.device))
        own = position.view(self.group.size(), tokens)[self.group.rank()]
        scores = torch.einsum("qbhc,kbhc->bhqk", query, self._gathered_of_ranks(key)) * self.scale
        scores = scores.masked_fill(position > own[:, None], -torch.inf)
        weights = self.dropout(scores.softmax(-1, dtype=torch.float32).to(value.dtype))
        output = torch.einsum("bhqk,kbhc->qbhc", weights, self._gathered_of_ranks(value))
        return output.reshape(tokens, sequences, -1)

    def _gathered(self, positions: torch.Tensor) -> torch.Tensor:
        """Reorder ``positions`` like an all-gather over ranks: rank by rank, the front chunk before the back chunk."""
        ranks, chunks = self.group.size(), positions.chunk(2 * self.group.size())
        return torch.cat([chunks[each] for rank in range(ranks) for each in (rank, 2 * ranks - 1 - rank)])

    def _gathered_of_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return gather_from_sequence_parallel_region(tensor, group=self.group)


def with_gathering_attention(layer: Any) -> Any:
    """Return the layer spec ``layer`` with ``GatheringAttention``."""
    layer = deepcopy(layer)
    layer.submodules.self_attention.submodules.core_attention = GatheringAttention
    return layer


def local_layers(config: Any, vp_stage: int | None = None) -> Any:
    """Return the spec of Megatron's layers with ``GatheringAttention``, for ``--spec``."""
    block = get_gpt_decoder_block_spec(config.transformer, use_transformer_engine=False, vp_stage=vp_stage)
    return replace(block, layer_specs=[with_gathering_attention(layer) for layer in block.layer_specs])
