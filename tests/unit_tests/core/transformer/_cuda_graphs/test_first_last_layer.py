"""First and last layer of each model chunk."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.transformer.cuda_graphs import (
    _determine_if_first_last_layer_of_this_vp_chunk,
    annotate_first_last_layer,
)
from megatron.core.transformer.transformer_config import TransformerConfig


def layer(number, layers=8, **parallel):
    config = TransformerConfig(
        num_layers=layers, hidden_size=8, num_attention_heads=1, pipeline_dtype=torch.float32, **parallel
    )
    return SimpleNamespace(layer_number=number, config=config)


def ends(layers=8, **parallel):
    """Return the numbers of the first and of the last layers of all chunks."""
    found = [
        _determine_if_first_last_layer_of_this_vp_chunk(layer(n, layers, **parallel)) for n in range(1, layers + 1)
    ]
    return [[number for number, pair in enumerate(found, 1) if pair[which]] for which in (0, 1)]


def test_layers_are_annotated_in_order():
    layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))
    annotate_first_last_layer(layers)
    assert [layer.is_first_layer for layer in layers] == [True, False, False]
    assert [layer.is_last_layer for layer in layers] == [False, False, True]


def test_annotation_takes_precedence():
    module = SimpleNamespace(is_first_layer=False, is_last_layer=True)
    assert _determine_if_first_last_layer_of_this_vp_chunk(module) == (False, True)


def test_module_without_number_is_its_own_chunk():
    assert _determine_if_first_last_layer_of_this_vp_chunk(SimpleNamespace()) == (True, True)


def test_model_without_pipeline_is_one_chunk():
    assert ends() == [[1], [8]]


def test_each_pipeline_stage_is_a_chunk():
    assert ends(pipeline_model_parallel_size=2) == [[1, 5], [4, 8]]


def test_each_virtual_stage_is_a_chunk():
    virtual = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    assert ends(**virtual) == [[1, 3, 5, 7], [2, 4, 6, 8]]


def test_number_beyond_the_model_is_refused():
    with pytest.raises(ValueError, match="layer_number 9 is in no pipeline stage of a model with --num-layers 8"):
        _determine_if_first_last_layer_of_this_vp_chunk(layer(9))
