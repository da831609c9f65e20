"""Test the capture report: graphs, memory pools, and eager parts."""

import json
import time
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


@pytest.fixture
def captured(one_rank, tmp_path):
    class Reporting(CapturedTraining):
        def make_helper(self):
            self.config.cuda_graph_report = str(tmp_path / "new")
            return super().make_helper()

    def capture(holds, **changes):
        """Capture three layers under Megatron-FSDP, and return the JSON report."""
        Reporting(graphed(holds, **changes)).delete()
        return json.loads((tmp_path / "new" / "capture.json").read_text())

    return capture


NAMES = [f"layer {number} (TransformerLayer)" for number in (1, 2, 3)]
OUTSIDE = ["modules outside of layers", "evaluation"]


@pytest.mark.usefixtures("side_stream")
@pytest.mark.parametrize(
    ("holds", "names", "eager", "logged"),
    [
        ("decoder", [NAMES], OUTSIDE, f"{NAMES[0]} to {NAMES[2]}, in one graph: 1 forward, 1 backward"),
        ("layer", [[name] for name in NAMES], OUTSIDE, f"{NAMES[0]} to {NAMES[2]}: 3 forward, 3 backward"),
        (
            "model",
            [["the whole model"]],
            ["calls without labels or with tensors of other shapes"],
            "the whole model: 1 forward, 1 backward",
        ),
    ],
)
def test_report_lists_every_graph(captured, monkeypatch, caplog, holds, names, eager, logged):
    ends = []
    capture_end = torch.cuda.CUDAGraph.capture_end
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", lambda graph: ends.append(capture_end(graph)))
    with caplog.at_level("INFO"):
        report = captured(holds)
    assert logged in caplog.text
    assert [part["names"] for part in report["captured"]] == names
    for part in report["captured"]:
        assert part["graphs"] == {"forward": 1, "backward": 1, "weight-gradient": 0}
    assert len(ends) == 2 * len(names) + report["collectives"]
    assert [pool["graphs"] for pool in report["pools"]] == [2 * len(names)] and report["pools"][0]["bytes"] > 0
    assert report["seconds"] > 0
    assert [part["what"] for part in report["eager"]] == eager


def test_report_names_captured_modules(captured):
    expected = {"what": "everything else in layers", "why": "--cuda-graph-modules names only attn"}
    assert expected in captured("layer", modules=("attn",))["eager"]


def report(folder, number=1, status=Status.CAPTURED):
    graphs: Any = SimpleNamespace(
        status=status, scope=CaptureScope(Holds.LAYER), models=(), decoder=None, layers_apart=[]
    )
    report_capture(stage_of([], cuda_graph_report=str(folder)), graphs, time.time(), number)


class TestFiles:
    @pytest.fixture(autouse=True)
    def rank_0(self, monkeypatch):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)

    def test_later_captures_have_their_own(self, tmp_path):
        report(tmp_path)
        report(tmp_path, number=2)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["capture.json", "capture_2.json"]

    def test_failed_write_is_a_warning(self, tmp_path, caplog):
        (tmp_path / "file").touch()
        report(tmp_path / "file")
        (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert "could not be written (--cuda-graph-report)" in record.getMessage()

    def test_other_ranks_and_failed_captures_have_none(self, tmp_path, caplog, monkeypatch):
        with caplog.at_level("INFO"):
            report(tmp_path, status=Status.EAGER)
            monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
            report(tmp_path)
        assert caplog.messages == [] and list(tmp_path.iterdir()) == []
