"""Predict the memory pool of graphs of whole passes, computed by TransformerEngine's kernels.

The formulas list the large tensors of a pass in order, and ``Allocator`` places them as torch does. The pool first gets
a block for each bucket of the optimizer's gradients. Activations reuse these blocks, and the gradients get new ones
after the passes if a tensor that still exists splits an old one.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from megatron.core.transformer._cuda_graphs.flags.options import alltoall_capacity_factor, grouped_tensor
from megatron.core.transformer._cuda_graphs.te.layers import decoder_layers
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.equal_splits import capacity_of_peer
from megatron.core.transformer.moe.moe_layer import MoELayer

MIB = 2**20
_BYTES = 2  # of an activation


class Block:
    """A part of a segment, from ``start`` to ``end``."""

    def __init__(self, segment: int, start: int, end: int):
        self.segment, self.start, self.end = segment, start, end

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.end - self.start


class Allocator:
    """Allocates from segments by best fit, as ``torch.cuda`` does without expandable segments.

    Attributes:
        reserved: Bytes of all segments.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._segments = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}  # keys: whether blocks are small

    def allocate(self, size: float) -> Block:
        """Return a block of at least ``size`` bytes."""
        size = max(-(-int(size) // 512), 1) * 512
        small = size <= MIB
        free = self._free[small]
        fitting = [block for block in free if block.size >= size]
        if fitting:
            block = min(fitting, key=lambda block: (block.size, block.segment, block.start))
            free.remove(block)
        else:
            length = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.reserved += length
            self._segments += 1
            block = Block(2 * self._segments + small, 0, length)
        if block.size - size > (511 if small else MIB):
            free.append(Block(block.segment, block.start + size, block.end))
            block.end = block.start + size
        return block

    def release(self, blocks: Iterable[Block]) -> None:
        """Free ``blocks`` and merge them with free neighbors."""
        for block in blocks:
            free = self._free[bool(block.segment % 2)]
            near = [each for each in free if each.segment == block.segment]
            for other in (each for each in near if each.end == block.start or each.start == block.end):
                free.remove(other)
                block = Block(block.segment, min(block.start, other.start), max(block.end, other.end))
            free.append(block)


class Passes:
    """Replays the allocations of the passes of one pipeline stage, with graphs of the whole model.

    Args:
        helper: The ``TECudaGraphHelper`` of the stage.
        args: Validated arguments.
    """

    def __init__(self, helper: Any, args: Any):
        self._allocator = Allocator()
        self._config, self._args = helper.config, args
        self._tokens = helper.seq_length * helper.micro_batch_size // args.context_parallel_size
        self._width = _BYTES * self._tokens * args.hidden_size  # bytes of the hidden states
        self._query, self._key = (
            _BYTES * self._tokens * heads * helper.config.kv_channels
            for heads in (helper.config.num_attention_heads, helper.config.num_query_groups)
        )
        self._chunks = [chunk.model for chunk in helper.stage.chunks]
        # Activations of passes in flight, by chunk: the blocks of each layer, then of the final norm and of the loss.
        self._in_flight: dict[int, list[list[list[Block]]]] = defaultdict(list)
        # Attributes of each layer's token dispatcher, which exist until a later pass of the layer.
        self._attributes: dict[Any, list[Block]] = {}

    def run(self, order: Sequence[float], gradients: Sequence[int]) -> int:
        """Return the size in bytes of the memory pool after the passes of ``order``.

        Args:
            order: The chunks of the passes, counted from 1, negative for backward.
            gradients: Bytes of the optimizer's gradients in each bucket.
        """
        self._drop(*gradients)
        for step in order:
            chunk = self._chunks[abs(int(step)) - 1]
            if step > 0:
                self._in_flight[id(chunk)].append(self._forward(chunk))
            else:
                self._backward(chunk, self._in_flight[id(chunk)].pop(0))
        self._add(*gradients)
        return self._allocator.reserved

    def _add(self, *sizes: float) -> list[Block]:
        return [self._allocator.allocate(size) for size in sizes]

    def _drop(self, *sizes: float) -> None:
        """Allocate temporary tensors of ``sizes`` bytes, and free them."""
        self._allocator.release(self._add(*sizes))

    def _weights(self, *sizes: float) -> list[Block]:
        """Allocate the gradients of weights, unless their matrix products add to the main gradients."""
        return [] if self._args.gradient_accumulation_fusion else self._add(*sizes)

    def _forward(self, chunk: Any) -> list[list[Block]]:
        kept = []
        state = self._add(self._width) if chunk.pre_process else []
        for layer in decoder_layers(chunk):
            blocks, state = self._layer(layer, state)
            kept.append(blocks)
        if not chunk.post_process:
            return kept  # the output of a pipeline stage stays in place
        norm, logits = self._add(self._width), self._add(self._logits)
        softmax = self._add(2 * self._logits)
        self._allocator.release(logits)
        return [*kept, [*state, *norm], softmax]

    @property
    def _logits(self) -> float:
        return _BYTES * self._tokens * self._chunks[0].vocab_size

    def _layer(self, layer: Any, state: list[Block]) -> tuple[list[Block], list[Block]]:
        """Allocate the activations of a layer with input ``state``. Return the blocks for backward, and the output."""
        config, query, key = self._config, self._query, self._key
        kept = [*state, *self._add(self._width)]
        together = self._add(query + 2 * key)
        split = self._add(query) if key < query else []
        normed = []
        if config.qk_layernorm:
            kept += split
            split, normed = self._add(query), self._add(key)
        kept += self._add(query)
        self._allocator.release(split)
        kept += self._add(key)
        self._allocator.release(normed)
        kept += self._add(key)
        self._allocator.release(together)
        kept += self._add(query, 4 * self._tokens * config.num_attention_heads)
        kept += self._add(self._width, self._width)
        if isinstance(layer.mlp, MoELayer):
            more, output = self._experts(layer.mlp)
            return kept + more, output
        kept += self._add(*self._hidden(config.ffn_hidden_size, self._tokens))
        return kept, self._add(self._width)

    def _hidden(self, ffn: int, rows: int) -> list[int]:
        """Return the sizes of the output and the activation of an MLP's first linear layer."""
        size = _BYTES * rows * ffn
        return [2 * size if self._config.gated_linear_unit else size, size]

    def expert_rows(self, experts: int) -> int:
        """Return the number of rows that this rank's experts compute in a layer if token counts stay on the GPU."""
        config, ranks = self._config, self._config.expert_model_parallel_size
        top_k = config.moe_router_topk
        if ranks == 1:
            return self._tokens * top_k
        factor = alltoall_capacity_factor(config) if self._exchanges else None
        return ranks * capacity_of_peer(self._tokens * top_k, top_k, experts, ranks, factor)

    @property
    def _exchanges(self) -> bool:
        config = self._config
        return config.expert_model_parallel_size > 1 and config.moe_token_dispatcher_type == "alltoall"

    def _experts(self, moe: Any) -> tuple[list[Block], list[Block]]:
        config, tokens, top_k = self._config, self._tokens, self._config.moe_router_topk
        rows, scores = self.expert_rows(moe.num_local_experts), tokens * config.num_moe_experts
        size, sent = _BYTES * rows * config.hidden_size, top_k * self._width
        kept: list[Block] = []
        until_end: list[Block] = []
        if config.moe_shared_expert_intermediate_size:
            kept += self._add(*self._hidden(config.moe_shared_expert_intermediate_size, tokens))
            until_end += self._add(self._width)
        kept += [*self._add(4 * scores, _BYTES * scores), *self._attributes.get(moe, ())]
        mapping = 4 * (2 * scores + tokens) if self._args.moe_permute_fusion else 8 * tokens * top_k
        self._attributes[moe] = self._add(_BYTES * scores, scores, mapping)
        if self._exchanges:
            until_end += self._add(sent)
            kept += self._add(*[8 * rows] * 4)
            buffers = self._add(size)
            until_end += self._add(size)
            self._allocator.release(buffers)
        kept += self._add(size)
        first, second = self._hidden(config.moe_ffn_hidden_size, rows)
        # Unless the activation is fused with the multiplication by the probabilities, its result is also kept.
        kept += self._add(first, second, *(() if config.gated_linear_unit else (second,)))
        computed = self._add(size)
        if config.expert_model_parallel_size > 1:
            ordered = self._add(size if self._exchanges else config.expert_model_parallel_size * self._width)
            self._allocator.release(computed)
            computed = ordered
        if self._exchanges:
            received = self._add(size)
            until_end += self._add(sent)
            self._allocator.release(computed + received)
            computed = []
        until_end += computed + self._add(self._width)
        output = self._add(self._width)
        self._allocator.release(until_end)
        return kept, output

    def _backward(self, chunk: Any, kept: list[list[Block]]) -> None:
        config, shared = self._config, []
        vocabulary = _BYTES * self._chunks[0].vocab_size * self._args.hidden_size
        if chunk.post_process:
            logits = self._add(self._logits)
            self._allocator.release(kept.pop())
            grad, weight = self._add(self._width), self._weights(vocabulary)
            self._allocator.release(logits)
            if chunk.share_embeddings_and_output_weights and chunk.pre_process:
                shared = weight  # until the embedding's gradient is added
            else:
                self._allocator.release(weight)
            self._allocator.release(kept.pop())
        else:
            grad = self._add(self._width)
        for layer, blocks in zip(reversed(decoder_layers(chunk)), reversed(kept), strict=True):
            weights = self._mlp_backward(layer.mlp)
            if os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0":
                sequence = self._args.seq_length // self._args.context_parallel_size
                self._drop((_BYTES * sequence + 4) * self._tokens * config.num_attention_heads)
            self._allocator.release(blocks + weights)
        if chunk.pre_process:
            self._drop(vocabulary)
            self._allocator.release(grad + shared)

    def _mlp_backward(self, mlp: Any) -> list[Block]:
        """Replay the allocations of an MLP's or MoE layer's backward pass; return the blocks of weight gradients."""
        config = self._config
        is_moe = isinstance(mlp, MoELayer)
        weight = self._add if is_moe else self._weights  # grouped matrix products do not add to the main gradients
        experts = mlp.num_local_experts if is_moe else 1
        rows = self.expert_rows(experts) if is_moe else self._tokens
        size = _BYTES * rows * config.hidden_size
        ffn = config.moe_ffn_hidden_size if is_moe else config.ffn_hidden_size
        outer, inner = self._hidden(ffn, rows)
        first, second = (experts * each for each in self._hidden(ffn, config.hidden_size))
        grad = self._add(size)
        if is_moe and config.expert_model_parallel_size > 1:
            self._drop(size, size)  # exchanged and reordered
        hidden = self._add(inner)
        weights = weight(second)
        self._allocator.release(grad)
        activation = self._add(outer)
        self._allocator.release(hidden)
        grad = self._add(size)
        weights += weight(first)
        self._allocator.release(activation + grad)
        return weights


def why_unknown(helper: Any, args: Any, *, of_layers: bool) -> str:
    """Return why the pool of the graphs is not predicted; empty if it is."""
    config = helper.config
    layers = [layer for chunk in helper.stage.chunks for layer in chunk.every_layer]
    reasons = {
        "graphs of single layers": of_layers,
        "--tensor-model-parallel-size above 1": args.tensor_model_parallel_size > 1,
        "recomputation": config.recompute_granularity is not None,
        "8-bit or 4-bit precision": bool(config.fp8 or config.fp4),
        "32-bit precision": not (config.bf16 or config.fp16),
        "dropout": bool(config.hidden_dropout or config.attention_dropout),
        "--cross-entropy-loss-fusion": config.cross_entropy_loss_fusion,
        "multi-token prediction": bool(config.mtp_num_layers),
        "--moe-latent-size": bool(config.moe_latent_size),
        "other layers than self-attention with an MLP or dropless experts (--moe-use-grouped-tensor)": not all(
            type(getattr(layer, "self_attention", None)) is SelfAttention
            and (type(layer.mlp) is MLP or (isinstance(layer.mlp, MoELayer) and grouped_tensor(config)))
            for layer in layers
        ),
    }
    return next((name for name, found in reasons.items() if found), "")
