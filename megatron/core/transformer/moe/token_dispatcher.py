"""Token dispatchers that keep token counts on the GPU with ``--moe-use-grouped-tensor``."""

from typing import Any

import torch

from megatron.core.token_bounds import token_bounds
from megatron.core.transformer._cuda_graphs.flags.options import alltoall_capacity_factor, grouped_tensor
from megatron.core.transformer.moe.equal_splits import Places, capacity_of_peer, cut, places
from megatron.core.transformer.moe.moe_utils import permute
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


class MoEAllGatherTokenDispatcher(_upstream.MoEAllGatherTokenDispatcher):
    """Extends megatron-core's all-gather dispatcher to return a fixed number of rows: the maximum for its experts."""

    routing_map: Any

    def dispatch_postprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor):
        """Select and permute the tokens ``[tokens, hidden]`` of all expert-parallel ranks for this rank's experts.

        Returns:
            Rows ``[tokens * min(top-k, experts of this rank), hidden]`` sorted by expert, unused rows last; the number
            of rows per expert, int64 on the GPU; and the probability of each row.
        """
        if not grouped_tensor(self.config):
            return super().dispatch_postprocess(hidden_states, probs)
        own = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        self.hidden_shape_before_permute = hidden_states.shape
        self.local_map = self.routing_map[:, own].contiguous()
        rows, row_probs, self.reversed_local_input_permutation_mapping, _, _ = permute(
            hidden_states,
            self.local_map,
            probs=probs[:, own].contiguous(),
            num_out_tokens=len(hidden_states) * min(self.router_topk, self.num_local_experts),
            fused=self.config.moe_permute_fusion,
        )
        self.routing_map = None
        self.local_probs = row_probs.detach()  # see MoEAlltoAllTokenDispatcher.dispatch_preprocess
        return rows, self.local_map.sum(dim=0), row_probs


class MoEAlltoAllTokenDispatcher(_upstream.MoEAlltoAllTokenDispatcher):
    """Extends megatron-core's all-to-all dispatcher to send the same number of rows to every peer:

    - without a capacity factor, the maximum that routing can produce;
    - with a capacity factor in force (``token_bounds``), the capacity;
    - with a capacity factor not in force, the largest number that any rank sends a peer, read by the host.

    Exceeding the capacity sets the overflow flag. Results are then undefined if the capacity is in force.
    """

    input_splits: Any
    output_splits: Any
    tokens_per_expert: torch.Tensor | None
    _sent: Places | None = None
    _received: Places | None = None

    def dispatch_preprocess(self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor):
        """Sort tokens by expert without keeping the autograd graph of ``probs``; see megatron-core.

        AccumulateGrad nodes in that graph would still refer to this step's stream in the next step, and a capture of
        the next step would fail (``--cuda-graph-impl full_iteration``).
        """
        dispatched = super().dispatch_preprocess(hidden_states, routing_map, probs)
        self.probs = probs.detach()  # only its dtype is read
        return dispatched

    def token_dispatch(self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor):
        """Send rows ``[tokens * top-k, hidden]`` and probabilities, sorted by expert, to the experts' ranks.

        Returns:
            Rows and probabilities for this rank's experts, ``[ranks * rows per peer, ...]``, sorted by source rank,
            then expert, with each rank's unused rows last.
        """
        rows, probs = permutated_local_input_tokens, permuted_probs
        if grouped_tensor(self.config) and self.ep_size > 1:
            top_k, experts = self.config.moe_router_topk, self.num_local_experts
            factor = alltoall_capacity_factor(self.config) if token_bounds else None
            capacity = capacity_of_peer(len(rows), top_k, experts, self.ep_size, factor)
            sent = self.input_splits.unsqueeze(1)
            received = self.num_global_tokens_per_local_expert if experts > 1 else self.output_splits.unsqueeze(1)
            self._keep_for_this_stream(sent, received)
            if factor is not None:
                token_bounds.note(sent > capacity)
                if token_bounds.in_force:
                    sent, received = cut(sent, capacity), cut(received, capacity)
                    self.tokens_per_expert = received.sum(0)
                else:
                    most = sent.max()
                    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, self.ep_group)
                    capacity = int(most)
                    token_bounds.note_load(capacity * self.ep_size / len(rows))
            self._sent = places(sent, capacity, len(rows))
            self._received = places(received, capacity, self.ep_size * capacity)
            self.input_splits = self.output_splits = None  # equal splits
            rows, probs = self._sent.to_buffers(rows), self._sent.to_buffers(probs)
        return super().token_dispatch(rows, probs)

    def dispatch_postprocess(self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor):
        """Return rows sorted by expert, then rank, the number per expert (int64, on the GPU), and probabilities."""
        if not grouped_tensor(self.config):
            return super().dispatch_postprocess(global_input_tokens, global_probs)
        tokens_per_expert, self.tokens_per_expert = self.tokens_per_expert, None
        if self._received:
            self._keep_for_this_stream(*self._received)
            global_input_tokens = self._received.from_buffers(global_input_tokens)
            global_probs = self._received.from_buffers(global_probs)
        return global_input_tokens, tokens_per_expert, global_probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Reorder the experts' output to the row order of the arguments of ``dispatch_postprocess``."""
        if not grouped_tensor(self.config):
            return super().combine_preprocess(hidden_states)
        received, self._received = self._received, None
        return received.to_buffers(hidden_states) if received else hidden_states

    def token_combine(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Send the experts' output back, and return it in the row order of the arguments of ``token_dispatch``."""
        combined: torch.Tensor = super().token_combine(hidden_states, *args, **kwargs)
        sent, self._sent = self._sent, None
        return sent.from_buffers(combined) if sent else combined

    def _keep_for_this_stream(self, *tensors: torch.Tensor) -> None:
        """Keep the memory of ``tensors``, allocated on other streams, until the current stream has used it."""
        for tensor in tensors if self.config.overlap_moe_expert_parallel_comm else ():
            tensor.record_stream(torch.cuda.current_stream())

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: torch.Tensor | None = None):
        if grouped_tensor(self.config):
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
