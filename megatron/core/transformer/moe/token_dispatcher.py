"""Dispatchers that leave the number of tokens of each expert on the device, with ``--moe-use-grouped-tensor``.

Everything else in this module is megatron-core's.
"""

from typing import TYPE_CHECKING, Any

import torch

from megatron.core.transformer._cuda_graphs.flags.own import grouped_tensor
from megatron.core.transformer.moe.moe_utils import permute
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


class MoEAllGatherTokenDispatcher(_upstream.MoEAllGatherTokenDispatcher):
    """megatron-core's, whose experts get as many rows as they may get at most."""

    routing_map: Any

    def dispatch_postprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor):
        """Permute the tokens ``[tokens, hidden]`` of all expert parallel ranks to the experts of this one.

        Returns:
            Rows ``[tokens * min(top-k, experts of this rank), hidden]``, expert after expert, those that no expert
            gets last; the number of rows of each expert, int64 on the device; and a probability for each row.
        """
        if not grouped_tensor(self.config):
            return super().dispatch_postprocess(hidden_states, probs)
        own = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        self.hidden_shape_before_permute = hidden_states.shape
        self.local_map = self.routing_map[:, own].contiguous()
        rows, self.local_probs, self.reversed_local_input_permutation_mapping, _, _ = permute(
            hidden_states,
            self.local_map,
            probs=probs[:, own].contiguous(),
            num_out_tokens=len(hidden_states) * min(self.router_topk, self.num_local_experts),
            fused=self.config.moe_permute_fusion,
        )
        self.routing_map = None
        return rows, self.local_map.sum(dim=0), self.local_probs


class MoEAlltoAllTokenDispatcher(_upstream.MoEAlltoAllTokenDispatcher):
    """megatron-core's, for a single expert parallel rank: its tokens are in the order of the experts as they are."""

    tokens_per_expert: torch.Tensor | None

    def dispatch_postprocess(self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor):
        """Return rows, the number of rows of each expert, int64 on the device, and probabilities."""
        if not grouped_tensor(self.config):
            return super().dispatch_postprocess(global_input_tokens, global_probs)
        tokens_per_expert, self.tokens_per_expert = self.tokens_per_expert, None
        return global_input_tokens, tokens_per_expert, global_probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the experts' output in the order of ``dispatch_postprocess``'s arguments."""
        if grouped_tensor(self.config):
            return hidden_states
        restored: torch.Tensor = super().combine_preprocess(hidden_states)
        return restored

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: torch.Tensor | None = None):
        if grouped_tensor(self.config):
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
