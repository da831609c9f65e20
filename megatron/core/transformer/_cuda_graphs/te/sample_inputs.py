"""Static inputs for each layer and micro-batch, shared if their lifetimes do not overlap."""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch

from megatron.core.transformer.enums import AttnMaskType, CudaGraphModule
from megatron.core.transformer.identity_op import IdentityOp

from ..engine.plan import Plan, share_inputs, signature
from ..flags.options import PACKED_FLAG, packed_sequences
from ..inputs import PackedUse, static_offsets

SampleArguments = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]


def sample_arguments(
    plan: Plan, make: Callable[[int], SampleArguments], values: Callable[[int], Hashable] = lambda index: None
) -> list[SampleArguments]:
    """Create the positional and keyword inputs of every slot of ``plan``, shared as in ``share_inputs``.

    Args:
        make: Creates new inputs for a callable index, with the same shapes, dtypes and values each time.
        values: Returns a key for the values of a callable's inputs; only callables with equal keys share inputs.
    """

    @cache
    def signature_of(index: int) -> Hashable:
        return values(index), signature(*make(index))

    index_of = plan.callable_of_slot
    return share_inputs(plan, lambda slot: signature_of(index_of[slot]), lambda slot: make(index_of[slot]))


def attention_mask_type(layer: Any) -> AttnMaskType | None:
    """Return the default mask type of the layer's self-attention; None if attention is not captured."""
    if not captures_attention(layer):
        return None
    return getattr(layer.self_attention, "attn_mask_type", AttnMaskType.causal)


def captures_attention(layer: Any) -> bool:
    """Return whether the self-attention of ``layer`` is captured."""
    if isinstance(getattr(layer, "self_attention", IdentityOp()), IdentityOp):
        return False
    modules = layer.config.cuda_graph_modules
    return not modules or CudaGraphModule.attn in modules


def packed_use(layer: Any) -> PackedUse | None:
    """Return how the graphs of ``layer`` use packed sequences; None without packing, or if attention runs eagerly."""
    if packed_sequences(layer.config) is None or not hasattr(layer, "self_attention"):
        return None
    if captures_attention(layer):
        return "read"
    return None if layer.config.cuda_graph_modules else "unused"


def default_kwargs(
    layers: Sequence[Any], sample_kwargs: Sequence[dict[str, torch.Tensor]]
) -> list[dict[str, torch.Tensor]]:
    """Return the captured keyword inputs of each slot, which are the defaults of replays.

    The engine shares static inputs of the same shape and dtype regardless of their values. If ``layers`` have different
    attention mask types, the results are therefore copies.
    """
    if len({attention_mask_type(layer) for layer in layers} - {None}) < 2:
        return list(sample_kwargs)
    values: dict[int, torch.Tensor] = {}
    return [
        {name: values.setdefault(id(static), static.clone()) for name, static in kwargs.items()}
        for kwargs in sample_kwargs
    ]


class LayerInputs:
    """Creates the static inputs of layers; ``seq_length`` counts tokens before any sharding.

    Raises:
        ValueError: Graphs read packed sequences, and micro-batches have more than one row.
    """

    def __init__(self, config: Any, seq_length: int, micro_batch_size: int):
        self._packed = packed_sequences(config)
        if self._packed is not None and micro_batch_size != 1:
            raise ValueError(f"{PACKED_FLAG} needs micro-batches of one row: set --micro-batch-size 1")
        self._config = config
        self._seq_length = seq_length
        self._micro_batch_size = micro_batch_size
        self._rotary: dict[int, torch.Tensor] = {}

    def make(self, layer: torch.nn.Module, model: torch.nn.Module | None, masked: bool = True) -> SampleArguments:
        """Create new inputs of ``layer``: hidden states and attention inputs.

        Args:
            model: The model whose rotary embedding the layer reads; None for no rotary embedding.
            masked: Whether attention reads a mask. Packed sequences have none.
        """
        masked = masked and self._packed is None
        inputs = self._inputs_and_mask(layer, masked)
        hidden_states = inputs.pop("hidden_states")
        if captures_attention(layer):
            if not masked:
                inputs.pop("attention_mask", None)
            elif attention_mask_type(layer) is not AttnMaskType.causal:
                inputs["attention_mask"].zero_()  # no mask by default
            if self._packed is not None:
                inputs |= static_offsets(self._packed, self._seq_length)
            rotary = self._rotary_embedding(model, hidden_states)
            if rotary is not None:
                inputs["rotary_pos_emb"] = rotary
        return (hidden_states,), inputs

    def _inputs_and_mask(self, layer: Any, masked: bool) -> dict[str, torch.Tensor]:
        """Return the layer's static inputs; with ``masked``, create the causal mask on the GPU.

        megatron-core creates the mask on the host for each layer, which takes longer than capturing the layer.
        """
        from megatron.core.transformer.transformer_layer import TransformerLayer  # imports cuda_graphs

        shape = self._seq_length, self._micro_batch_size
        if getattr(layer.get_layer_static_inputs, "__func__", None) is not TransformerLayer.get_layer_static_inputs:
            return layer.get_layer_static_inputs(*shape)
        base: Any = super(TransformerLayer, layer)
        inputs = base.get_layer_static_inputs(*shape)
        if masked and captures_attention(layer):
            tokens = self._seq_length // layer.config.context_parallel_size
            mask = torch.ones(self._micro_batch_size, 1, tokens, self._seq_length, dtype=torch.bool, device="cuda")
            inputs["attention_mask"] = mask.triu_(1)
        return inputs

    def _rotary_embedding(self, model: Any | None, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return the rotary embedding that all layers read, ``[sequence, 1 or micro-batch, 1, head]``, or None."""
        kind = getattr(model, "position_embedding_type", None)
        if kind not in ("rope", "yarn", "mrope") or self._config.multi_latent_attention:
            return None
        assert model is not None
        rotary = model.rotary_pos_emb
        if kind == "mrope":  # one per slot: positions differ between micro-batches
            shape = 3, self._micro_batch_size, self._seq_length
            positions = torch.zeros(shape, dtype=torch.int64, device=hidden_states.device)
            return rotary(positions, model.mrope_section)
        if id(model) not in self._rotary:
            forward = type(rotary).forward
            forward = getattr(forward, "__wrapped__", forward)  # its cache would keep the input after the graphs
            length = rotary.get_rotary_seq_len(None, model.decoder, hidden_states, self._config, None)
            made = forward(rotary, length, packed_seq=self._packed is not None)
            # yarn also returns a scale, which is not a layer input
            made = made[0] if isinstance(made, tuple) else made
            made.constant = True  # layers share it
            self._rotary[id(model)] = made
        return self._rotary[id(model)]
