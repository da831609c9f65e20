"""capture_observer: which rank watches, what a failure leaves, where the report goes."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from megatron.core.transformer._cuda_graphs.engine.plan import ordered_plan
from megatron.core.transformer._cuda_graphs.report import timeline
from megatron.core.transformer._cuda_graphs.te.agreement import CaptureAgreement
from megatron.core.transformer._cuda_graphs.te.capture_observer import CaptureObserver

from .stages import stage_of


def observer_of(folder=None, number=1):
    """An observer of a stage."""
    return CaptureObserver(stage_of([], cuda_graph_report=folder), number)


def finish(observer):
    """Report, of a stage without graphs for evaluation."""
    observer.finish(SimpleNamespace(models=(), evaluation=()), "")


def observe(folder=None, number=1, layers=2):
    """Capture linear layers for two micro-batches that are in flight together, under an observer; return it."""
    observer = observer_of(folder, number)
    agreement = CaptureAgreement([], None, observer.timeline)
    modules = [torch.nn.Linear(3, 3, device="cuda") for _ in range(layers)]
    samples = [(torch.ones(2, 3, device="cuda", requires_grad=True),) for _ in range(2 * layers)]
    arguments: dict[str, Any] = {
        "_order": [1, 1, -1, -1],
        "_num_layers_per_chunk": [layers],
        "num_warmup_iters": 1,
        "sample_kwargs": [{}] * len(samples),
    }
    names = [f"layer {index + 1}" for index in range(layers)]

    def votes(name):
        return {f"{kind}_pre_hooks": {0: agreement.beginning(name, kind)} for kind in ("forward", "backward")}

    observer.start()
    observer.expect(ordered_plan([1, 1, -1, -1], [layers], layers), names, 1)
    graphs = make_graphed_callables(
        tuple(modules), samples, capture_time_hooks=[votes(name) for name in names], **arguments
    )
    observer.passes_end()
    observer.captured_layers([modules], names, graphs, [(args, {}) for args in samples])
    agreement.finish()
    return observer


@pytest.mark.usefixtures("cpu_backend")
class TestObserver:
    def test_every_micro_batch_has_graphs_and_passes(self, tmp_path, caplog):
        with caplog.at_level("INFO"):
            finish(observe(str(tmp_path)))
        (report,) = [record.getMessage() for record in caplog.records if "CUDA graphs, native" in record.getMessage()]
        assert "layer 1 to layer 2        4         4 " in report
        assert sorted(path.name for path in tmp_path.iterdir()) == ["capture.html", "capture.json"]
        data = json.loads((tmp_path / "capture.json").read_text())
        order = [(0, 0, "forward"), (1, 0, "forward"), (0, 1, "forward"), (1, 1, "forward")]
        order += [(1, 0, "backward"), (0, 0, "backward"), (1, 1, "backward"), (0, 1, "backward")]
        assert [tuple(step) for step in data["order"]] == order
        assert [(each["layer"], each["micro_batch"], each["kind"]) for each in data["passes"]] == order
        assert [layer["micro_batches"] for layer in data["layers"]] == [2, 2]
        assert [pool["graphs"] for pool in data["pools"]] == [8]

    def test_later_captures_have_files_of_their_own(self, tmp_path):
        for number in (1, 2):
            finish(observe(str(tmp_path), number))
        assert sorted(path.stem for path in tmp_path.glob("*.json")) == ["capture", "capture_2"]

    def test_a_report_that_cannot_be_written_is_a_warning(self, tmp_path, caplog):
        (tmp_path / "file").touch()
        finish(observe(str(tmp_path / "file")))
        (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert "could not be written (--cuda-graph-report)" in record.getMessage()

    def test_without_a_folder_nothing_is_written(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        finish(observe())
        assert list(tmp_path.iterdir()) == []

    def test_other_ranks_report_nothing(self, monkeypatch, tmp_path, caplog):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
        assert observer_of().timeline is None
        with caplog.at_level("INFO"):
            finish(observe(str(tmp_path / "folder")))
        assert not (tmp_path / "folder").exists()
        assert "CUDA graphs" not in caplog.text

    def test_without_a_capture_there_is_no_report(self, tmp_path, caplog):
        observer = observer_of(str(tmp_path))
        observer.start()
        with caplog.at_level("INFO"):
            finish(observer)
        assert caplog.messages == [] and list(tmp_path.iterdir()) == []

    def test_the_time_in_which_other_ranks_are_waited_for_is_noted(self):
        observer = observer_of()
        CaptureAgreement([], None, observer.timeline).join()
        assert observer.timeline is not None and observer.timeline.waited > 0

    def test_failures_are_agreed_on_as_without_and_take_the_progress_away(self, monkeypatch):
        shown: list[str] = []
        progress = SimpleNamespace(begin=shown.append, close=lambda: shown.append("closed"))
        monkeypatch.setattr(timeline, "Progress", lambda total: progress)
        observer = observer_of()
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        watched = CaptureAgreement([], None, observer.timeline)
        watched.begin("the whole model", "forward")
        failed = "CUDA graph capture failed on rank 0, the whole model, forward: RuntimeError: out of memory"
        assert str(watched.failed(RuntimeError("out of memory"))) == failed
        assert shown == ["the whole model, forward warm-up", "closed"]

    def test_chunks_captured_as_a_whole_are_rows_with_passes_of_each_micro_batch(self, tmp_path, caplog):
        observer = observer_of(str(tmp_path))
        agreement = CaptureAgreement([], None, observer.timeline)
        order, names = [1, 2, -2, 1, -1, 2, -2, -1], ["chunk 0", "chunk 1"]
        observer.start()
        observer.expect(ordered_plan(order, [1, 1], 2), names, 1)
        for step in order * 2:  # warm-up, and capture
            agreement.begin(names[abs(step) - 1], "forward" if step > 0 else "backward")
        graphs = SimpleNamespace(forward_graph=torch.cuda.CUDAGraph(), backward_graph=torch.cuda.CUDAGraph())
        for graph in vars(graphs).values():
            graph.pool = lambda: (0, 1)
        observer.captured_models([[graphs] * 2] * 2, names)
        with caplog.at_level("INFO"):
            finish(observer)
        (text,) = [record.getMessage() for record in caplog.records if "CUDA graphs, native" in record.getMessage()]
        rows = [line.split()[:-2] for line in text.splitlines()[2:5]]
        assert rows == [
            ["chunk", "0", "2", "2", "0"],
            ["chunk", "1", "2", "2", "0"],
            ["whole", "model", "4", "4", "0"],
        ]
        data = json.loads((tmp_path / "capture.json").read_text())
        kinds = [(0, 0), (1, 0), (1, 0), (0, 1), (0, 0), (1, 1), (1, 1), (0, 1)]
        expected = [[*place, "forward" if step > 0 else "backward"] for place, step in zip(kinds, order, strict=True)]
        assert data["order"] == expected
        assert [[each["layer"], each["micro_batch"], each["kind"]] for each in data["passes"]] == expected
        assert ">chunk 1<" in (tmp_path / "capture.html").read_text()
