"""Determines which layers are the first and the last of a model chunk."""

from collections.abc import Sequence

import torch


def annotate_first_last_layer(layers: Sequence[torch.nn.Module]) -> None:
    """Set ``is_first_layer`` and ``is_last_layer`` of each of ``layers``, the layers of one model chunk in order."""
    last = len(layers) - 1
    for index, layer in enumerate(layers):
        layer.is_first_layer = index == 0
        layer.is_last_layer = index == last


def _determine_if_first_last_layer_of_this_vp_chunk(base_module: torch.nn.Module) -> tuple[bool, bool]:
    """Whether ``base_module`` is the first, and whether it is the last layer of its chunk.

    A chunk is the part of the model of one pipeline rank and virtual pipeline stage. The annotations of
    ``annotate_first_last_layer`` are used if the module has them; otherwise ``layer_number`` (from 1, over the whole
    model) and the layout of the model's ``TransformerConfig`` over pipeline ranks and virtual stages. A module without
    a layer number is a chunk of its own.

    Raises:
        ValueError: no chunk of the model has a layer of this number.
    """
    if hasattr(base_module, "is_first_layer") and hasattr(base_module, "is_last_layer"):
        return bool(base_module.is_first_layer), bool(base_module.is_last_layer)
    if not hasattr(base_module, "layer_number"):
        return True, True
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    number, config = base_module.layer_number, base_module.config
    stages = config.virtual_pipeline_model_parallel_size
    for rank in range(config.pipeline_model_parallel_size):
        for stage in (None,) if stages is None else range(stages):
            before = get_transformer_layer_offset(config, stage, rank)
            count = get_num_layers_to_build(config, stage, rank)
            if before < number <= before + count:
                return number == before + 1, number == before + count
    raise ValueError(f"layer_number {number} is in no pipeline stage of a model with --num-layers {config.num_layers}")
