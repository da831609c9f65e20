"""Test the search for models inside wrappers, and for the first and last layers of a chunk."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.transformer._cuda_graphs.te.layers import language_model_of, vision_model_of
from megatron.core.transformer.cuda_graphs import (
    _determine_if_first_last_layer_of_this_vp_chunk,
    annotate_first_last_layer,
)
from megatron.core.transformer.transformer_config import TransformerConfig


def wrapped(module, levels=2):
    for _ in range(levels):
        module = SimpleNamespace(module=module)
    return module


@pytest.mark.parametrize("levels", [0, 1, 3])
def test_models_are_found_inside_wrappers(levels):
    model = SimpleNamespace(decoder="decoder", vision_model="vision model")
    assert language_model_of(wrapped(model, levels)) is model
    assert vision_model_of(wrapped(model, levels)) == "vision model"


def test_chunk_without_models_has_none():
    assert language_model_of(wrapped(SimpleNamespace())) is None
    assert vision_model_of(wrapped(SimpleNamespace())) is None


def test_annotated_layers_are_first_and_last_in_order():
    layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))
    annotate_first_last_layer(layers)
    found = [_determine_if_first_last_layer_of_this_vp_chunk(layer) for layer in layers]
    assert found == [(True, False), (False, False), (False, True)]


def test_layers_without_annotations_are_located_by_number(monkeypatch):
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 1)
    config = TransformerConfig(
        num_layers=12,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )
    layers = [SimpleNamespace(config=config, layer_number=number) for number in (4, 5, 6, 10, 11, 12)]
    found = [_determine_if_first_last_layer_of_this_vp_chunk(layer) for layer in layers]
    assert found == [(True, False), (False, False), (False, True)] * 2


def test_module_without_layer_number_is_first_and_last():
    assert _determine_if_first_last_layer_of_this_vp_chunk(torch.nn.Identity()) == (True, True)
