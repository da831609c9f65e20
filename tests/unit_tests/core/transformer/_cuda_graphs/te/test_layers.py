"""Test the search for models inside wrappers, and for the first and last layers of a chunk."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.transformer._cuda_graphs.te.layers import language_model_of, vision_model_of
from megatron.core.transformer.cuda_graphs import (
    _determine_if_first_last_layer_of_this_vp_chunk,
    annotate_first_last_layer,
)


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
    *layers, alone = (torch.nn.Identity() for _ in range(4))
    annotate_first_last_layer(layers)
    found = [_determine_if_first_last_layer_of_this_vp_chunk(layer) for layer in (*layers, alone)]
    assert found == [(True, False), (False, False), (False, True), (True, True)]
