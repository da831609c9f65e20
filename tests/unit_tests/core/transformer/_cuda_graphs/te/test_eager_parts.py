"""eager_parts of capture_observer: what stays eager, and why."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.transformer._cuda_graphs.te.capture_observer import eager_parts
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.module import GraphableMegatronModule

from .stages import stage_of


class Layer(torch.nn.Module):
    """A layer that cannot be captured."""

    layer_number = 2


class Graphable(GraphableMegatronModule):
    """A layer that can be."""

    layer_number = 1

    def __init__(self):
        torch.nn.Module.__init__(self)


class Model(torch.nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.embedding, self.rotary = torch.nn.Embedding(2, 2), torch.nn.Identity()
        self.decoder = torch.nn.Module()
        self.decoder.layers, self.decoder.final_norm = torch.nn.ModuleList(layers), torch.nn.LayerNorm(2)


def graphs_of(models=(), evaluation=()) -> Any:
    return SimpleNamespace(models=models, evaluation=evaluation)


def parts(*layers, graphed=(), modules=(), refused="", evaluation=(), chunks=1, models=()):
    stage = stage_of(*[list(graphed)] * chunks, cuda_graph_modules=list(modules))
    with_model = [replace(chunk, model=Model(*layers)) for chunk in stage.chunks]
    found = eager_parts(replace(stage, chunks=with_model), graphs_of(models, evaluation), refused)
    return {part.what: part.why for part in found}


def test_modules_with_parameters_outside_of_layers():
    layer = Graphable()
    assert [*parts(layer, graphed=[layer])] == [
        "embedding (Embedding)",
        "decoder.final_norm (LayerNorm)",
        "evaluation",
    ]


@pytest.mark.parametrize(
    ("layer", "modules", "why"),
    [
        (Layer(), (), "it is no GraphableMegatronModule"),
        (Graphable(), (CudaGraphModule.mamba,), "--cuda-graph-modules mamba selects nothing in it"),
        (Graphable(), (), "_discover_layers leaves it out"),
    ],
)
def test_why_a_layer_has_no_graph(layer, modules, why):
    assert parts(layer, modules=modules)[f"layer {layer.layer_number} ({type(layer).__name__})"] == why


def test_a_repeated_layer_has_no_graph():
    model, stage = Model(), stage_of([])
    mtp = SimpleNamespace(layers=[SimpleNamespace(mtp_model_layer=Graphable())])
    model.__dict__.update(mtp=mtp, config=SimpleNamespace(mtp_use_repeated_layer=True, mtp_num_layers=2))
    stage = replace(stage, chunks=[replace(stage.chunks[0], model=model)])
    found = {part.what: part.why for part in eager_parts(stage, graphs_of(), "")}
    assert found["layer 1 (Graphable)"] == "it runs several times for one micro-batch"


def test_parts_of_layers():
    modules = CudaGraphModule.attn, CudaGraphModule.moe_router
    assert parts(modules=modules)["all else in layers"] == "--cuda-graph-modules names attn moe_router only"


def test_the_whole_model():
    assert parts(refused="it has two chunks")["the model as a whole"] == "it has two chunks"
    assert "the model as a whole" not in parts()


def test_beside_graphs_of_the_whole_model():
    assert [*parts(Layer(), models=[object()])] == [
        "calls without labels or with tensors of other shapes",
    ]


def test_chunks_are_told_apart():
    assert [what for what in parts(chunks=2) if "embedding" in what] == [
        "embedding (Embedding) of chunk 0",
        "embedding (Embedding) of chunk 1",
    ]


def test_a_chunk_without_a_model_has_no_parts():
    assert [part.what for part in eager_parts(stage_of([]), graphs_of(), "")] == ["evaluation"]
