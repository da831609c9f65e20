"""capture_observer: what a capture reports, and the parts that run eagerly."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.transformer._cuda_graphs.report import CaptureRecorder
from megatron.core.transformer._cuda_graphs.te import capture_observer
from megatron.core.transformer._cuda_graphs.te.capture_observer import eager_parts, report_capture
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.module import GraphableMegatronModule
from tests.unit_tests.core.distributed.captured_training import CapturedTraining, graphed

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


def graphs_of(models=()) -> Any:
    return SimpleNamespace(models=models)


def parts(*layers, graphed=(), modules=(), refused="", chunks=1, models=()):
    stage = stage_of(*[list(graphed)] * chunks, cuda_graph_modules=list(modules))
    with_model = [replace(chunk, model=Model(*layers)) for chunk in stage.chunks]
    found = eager_parts(replace(stage, chunks=with_model), graphs_of(models), refused)
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
    assert found["layer 1 (Graphable)"] == "it runs several times per micro-batch"


def test_parts_of_layers():
    modules = CudaGraphModule.attn, CudaGraphModule.moe_router
    assert parts(modules=modules)["everything else in layers"] == "--cuda-graph-modules names only attn moe_router"


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


@pytest.fixture
def captured(one_rank, tmp_path):
    """A function that captures three layers under Megatron-FSDP with a report in ``tmp_path`` and returns its JSON."""

    class Reporting(CapturedTraining):
        def make_helper(self):
            self.config.cuda_graph_report = str(tmp_path)
            return super().make_helper()

    def capture(holds, **changes):
        Reporting(graphed(holds, **changes)).delete()
        return json.loads((tmp_path / "capture.json").read_text())

    return capture


NAMES = [f"layer {number} (TransformerLayer)" for number in (1, 2, 3)]
OUTSIDE = ["embedding (LanguageModelEmbedding)", "decoder.final_layernorm (LayerNorm)", "evaluation"]


@pytest.mark.usefixtures("side_stream")
@pytest.mark.parametrize(
    ("holds", "names", "eager"),
    [
        ("decoder", [NAMES], OUTSIDE),
        ("layer", [[name] for name in NAMES], OUTSIDE),
        ("model", [["the whole model"]], ["calls without labels or with tensors of other shapes"]),
    ],
)
def test_report_of_a_capture(captured, monkeypatch, holds, names, eager):
    ends = []
    capture_end = torch.cuda.CUDAGraph.capture_end
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", lambda graph: ends.append(capture_end(graph)))
    report = captured(holds)
    assert [part["names"] for part in report["captured"]] == names
    for part in report["captured"]:
        assert part["graphs"] == {"forward": 1, "backward": 1, "weight_gradients": 0}
        assert part["warm_up_seconds"] > 0 and part["capture_seconds"] > 0
    assert report["whole_model"] == (holds == "model")
    assert len(ends) == 2 * len(names) + report["collectives"]
    assert [pool["graphs"] for pool in report["pools"]] == [2 * len(names)] and report["pools"][0]["bytes"] > 0
    assert [sample["phase"] for sample in report["memory"]] == ["start", "warm-up", "capture", "captured", "end"]
    seconds = report["seconds"]
    assert 0 < seconds["warm_up"] + seconds["capture"] < seconds["total"]
    assert [part["what"] for part in report["eager"]] == eager


def test_report_of_parts_of_layers(captured):
    (part, *_) = captured("layer", modules=("attn",))["eager"]
    assert part == {"what": "everything else in layers", "why": "--cuda-graph-modules names only attn"}


class TestFiles:
    """Files of a stage whose one layer has graphs for two micro-batches."""

    @staticmethod
    def report(folder, number=1, recorder=None, eager_because=""):
        layer, pool = Graphable(), SimpleNamespace(pool=lambda: (0, 1))
        layer.cuda_graphs = [SimpleNamespace(forward_graph=pool, backward_graph=pool)] * 2
        stage = stage_of([layer], cuda_graph_report=None if folder is None else str(folder))
        graphs: Any = SimpleNamespace(
            eager_because=eager_because, models=(), decoder=None, evaluation=(), layers_apart=[[layer]]
        )
        with mock.patch.object(capture_observer, "pools_of", return_value=[]):
            report_capture(stage, graphs, recorder or CaptureRecorder(active=True), "", number)

    def test_later_captures_have_their_own(self, tmp_path, caplog):
        with caplog.at_level("INFO"):
            self.report(tmp_path)
            self.report(tmp_path, number=2)
        assert sorted(path.stem for path in tmp_path.glob("*.json")) == ["capture", "capture_2"]
        assert "layer 1 (Graphable)        2         2 " in caplog.text

    def test_a_failure_to_write_is_a_warning(self, tmp_path, caplog):
        (tmp_path / "file").touch()
        self.report(tmp_path / "file")
        (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert "could not be written (--cuda-graph-report)" in record.getMessage()

    def test_any_failure_is_a_warning(self, caplog):
        recorder = CaptureRecorder(active=True)
        recorder.seconds = None  # type: ignore[assignment]
        self.report(None, recorder=recorder)
        assert "there will be no report on CUDA graphs" in caplog.text

    def test_other_ranks_and_failed_captures_have_none(self, tmp_path, caplog):
        with caplog.at_level("INFO"):
            self.report(tmp_path, recorder=CaptureRecorder(active=False))
            self.report(tmp_path, eager_because="capture-failed")
        assert caplog.messages == [] and list(tmp_path.iterdir()) == []
