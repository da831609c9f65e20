"""Test the capture report: graphs, memory pools, and eager parts."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.transformer._cuda_graphs.te.capture_report import eager_parts, report_capture
from megatron.core.transformer._cuda_graphs.te.capture_state import CaptureScope, Holds, Status
from megatron.core.transformer._cuda_graphs.te.layers import why_not_graphable
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.module import GraphableMegatronModule
from tests.unit_tests.core.distributed.captured_training import CapturedTraining, graphed

from .stages import stage_of


class Layer(torch.nn.Module):
    """A layer that cannot be captured."""

    layer_number = 2


class Graphable(GraphableMegatronModule):
    """A layer that can be captured."""

    layer_number = 1

    def __init__(self):
        torch.nn.Module.__init__(self)


def parts(*layers, modules=(), not_model=""):
    """Return the eager parts of a stage with ``layers``, and the reason for each.

    ``not_model`` is the reason why the whole model is not captured.
    """
    stage = stage_of([], cuda_graph_modules=list(modules))
    model = SimpleNamespace(decoder=SimpleNamespace(layers=layers))
    stage = replace(stage, chunks=[replace(stage.chunks[0], model=model)])
    return dict(eager_parts(stage, CaptureScope(Holds.LAYER, not_model)))


@pytest.mark.parametrize(
    ("layer", "modules", "why"),
    [
        (Layer(), (), "it is not a GraphableMegatronModule"),
        (Graphable(), (CudaGraphModule.mamba,), "--cuda-graph-modules mamba selects no part of it"),
        (Graphable(), (), "it runs several times per micro-batch, or _discover_layers omits it"),
    ],
)
def test_eager_layer_has_its_reason(layer, modules, why):
    assert parts(layer, modules=modules)[f"layer {layer.layer_number} ({type(layer).__name__})"] == why


@pytest.mark.parametrize("modules", [None, []])
def test_layer_excluded_by_core_has_its_reason(modules, monkeypatch):
    monkeypatch.setattr("megatron.core.transformer.cuda_graphs._layer_is_graphable", lambda layer, config: False)
    config = SimpleNamespace(cuda_graph_modules=modules)
    assert why_not_graphable(Graphable(), config) == "_layer_is_graphable excludes it"


def test_report_lists_why_the_model_is_not_captured():
    assert parts(not_model="it has two chunks")["the model as a whole"] == "it has two chunks"
    assert "the model as a whole" not in parts()


@pytest.mark.usefixtures("one_rank", "side_stream")
@pytest.mark.parametrize(
    ("holds", "pairs", "what"),
    [("layer", 3, "3 layers"), ("model", 1, "the whole model")],
)
def test_report_counts_pairs_and_their_memory(caplog, holds, pairs, what):
    with caplog.at_level("INFO"):
        CapturedTraining(graphed(holds)).delete()
    pattern = rf"Captured {what} in [\d.]+ s \(pairs of CUDA graphs: {pairs}, memory: ([\d.]+) MiB\)(\n.*)?"
    (found,) = filter(None, (re.fullmatch(pattern, message) for message in caplog.messages))
    assert float(found[1]) > 0


@pytest.mark.parametrize(("rank", "status"), [(0, Status.EAGER), (1, Status.CAPTURED)])
def test_other_ranks_and_failed_captures_have_no_report(caplog, monkeypatch, rank, status):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    graphs: Any = SimpleNamespace(status=status)
    with caplog.at_level("INFO"):
        report_capture(stage_of([]), graphs, 0)
    assert caplog.messages == []
