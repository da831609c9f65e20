"""report: times and progress of a capture, and its report as text, JSON and HTML."""

import json
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import count
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron.core.transformer._cuda_graphs import report as module
from megatron.core.transformer._cuda_graphs.report import (
    Captured,
    CaptureRecorder,
    CaptureReport,
    Eager,
    Memory,
    Pool,
    in_mib,
)

MIB = 2**20


def graphs(forward, backward):
    return {"forward": forward, "backward": backward, "weight_gradients": 0}


REPORT = CaptureReport(
    whole_model=False,
    captured=[
        Captured(["layer 1 (Layer)", "layer 2 (Layer)"], 2, graphs(2, 2), 0.5, 1.0),
        Captured(["layer 3 (Layer)"], 2, graphs(2, 2), 0.125, 0.25),
        Captured(["layer 4 (Layer)"], 2, graphs(2, 2), 0.125, 0.25),
    ],
    collectives=3,
    seconds={"total": 3.0, "warm_up": 0.75, "capture": 1.5, "waiting": 0.5},
    memory=[Memory("start", 100 * MIB, 200 * MIB), Memory("<end>", 120 * MIB, 300 * MIB)],
    pools=[Pool(12, 80 * MIB)],
    eager=[
        Eager("embedding (Embedding)", "graphs hold layers only"),
        Eager("<norm>", "graphs hold layers only"),
        Eager("evaluation", "it is FP8"),
    ],
)
TABLE = """\
CUDA graphs, rank 0:
  graphs                                            forward  backward  weight gradients  warm-up s  capture s
  layer 1 (Layer) to layer 2 (Layer), in one graph        2         2                 0      0.500      1.000
  layer 3 (Layer) to layer 4 (Layer)                      4         4                 0      0.250      0.500
  all                                                     6         6                 0      0.750      1.500
  3.00 s in total, 0.50 s of them waiting for other ranks
  3 more graphs hold only collectives
  a memory pool of 80.0 MiB holds 12 graphs
  memory allocated 100.0 MiB -> 120.0 MiB, reserved 200.0 MiB -> 300.0 MiB
  eager: embedding (Embedding), <norm>, because graphs hold layers only
  eager: evaluation, because it is FP8"""


def test_table():
    assert REPORT.table() == TABLE


def test_table_of_the_whole_model_has_one_row():
    whole = Captured(["the whole model"], 1, graphs(1, 1), 0.75, 1.5)
    lines = replace(REPORT, whole_model=True, captured=[whole], collectives=0, memory=[]).table().splitlines()
    assert lines[2].split() == ["the", "whole", "model", "1", "1", "0", "0.750", "1.500"]
    assert lines[3].startswith("  3.00 s in total") and not any("memory alloc" in line for line in lines)


class Page(HTMLParser):
    """A page's elements, and the texts of its table cells. Raises unless all tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.elements: list = []
        self.cells: list = []
        self._open: list = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "td" in self._open:
            self.cells[-1] += data


def test_page_has_every_part_and_loads_nothing():
    text = REPORT.page()
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in ("script", "link", "img", "iframe") and not {"src", "href", "onclick"} & set(attributes)
    assert "http" not in text and "url(" not in text and "@import" not in text
    assert page.cells[6:12] == ["layer 3 (Layer) to layer 4 (Layer)", "4", "4", "0", "0.250", "0.500"]
    assert page.cells[18:24] == ["start", " 100.0 MiB", " 200.0 MiB", "<end>", " 120.0 MiB", " 300.0 MiB"]
    assert page.cells[24:] == [text for part in REPORT.eager for text in (part.what, part.why)]
    assert "<li>a memory pool of 80.0 MiB holds 12 graphs</li>" in text
    meters = [(int(each["value"]), int(each["max"])) for tag, each in page.elements if tag == "meter"]
    assert meters == [(size * MIB, 300 * MIB) for size in (100, 200, 120, 300)]


def test_files(tmp_path):
    data, html = REPORT.write(tmp_path / "new" / "folder", "capture")
    assert (data.name, html.name) == ("capture.json", "capture.html")
    assert json.loads(data.read_text()) == json.loads(json.dumps(asdict(REPORT)))
    assert html.read_text(encoding="utf-8") == REPORT.page()


@pytest.mark.parametrize(("size", "text"), [(0, "0.0 MiB"), (512, "0.5 KiB"), (MIB, "1.0 MiB"), (2**31, "2,048.0 MiB")])
def test_bytes_have_a_unit(size, text):
    assert in_mib(size) == text


class Bar:
    """Stands for ``tqdm.tqdm`` and records what is shown."""

    last: "Bar"

    def __init__(self, total=None, **_):
        Bar.last = self
        self.total, self.done, self.shown = total, 0, []

    def set_postfix_str(self, text, refresh):
        self.shown.append(text)

    def update(self, number):
        self.done += number

    def close(self):
        self.shown.append("closed")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances; allocated memory grows by a byte per look; stderr is no terminal."""
    now = SimpleNamespace(seconds=10.0, capturing=False)
    look = count(1)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=None))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(look))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 100)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)
    return now


def run(recorder, clock, name, phase, seconds):
    """Run a pass that waits half a second for other ranks."""

    def wait():
        clock.seconds += 0.5

    recorder.begin(name, phase)
    recorder.wait(wait)
    clock.seconds += seconds


LAYERS = [("one", "forward"), ("two", "forward"), ("two", "backward"), ("one", "backward")]


def test_recorder_tells_warm_up_of_layers_by_the_number_of_passes(clock):
    recorder = CaptureRecorder(active=True)
    recorder.sample("start")
    recorder.expect(len(LAYERS), warmup_iters=2)
    run(recorder, clock, "before the first layer", "", 100)  # counts for no pass
    for seconds in (1, 2, 8):
        for name, phase in LAYERS:
            run(recorder, clock, name, phase, seconds)
    recorder.end()
    recorder.end()
    assert recorder.seconds == {(name, "warm-up"): 6 for name in ("one", "two")} | {
        (name, "capture"): 16 for name in ("one", "two")
    }
    assert recorder.waited == 13 * 0.5 and recorder.total == 100 + 44 + recorder.waited
    assert [(sample.phase, sample.allocated) for sample in recorder.memory] == [
        *(("start", 1), ("warm-up", 2), ("capture", 3), ("captured", 4))
    ]


def test_recorder_tells_warm_up_of_a_model_by_its_stream(clock):
    recorder = CaptureRecorder(active=True)
    for clock.capturing, seconds in ((False, 1), (True, 2)):
        for phase in ("before forward", "forward", "backward"):
            run(recorder, clock, "the whole model", phase, seconds)
    recorder.end()
    assert recorder.seconds == {("the whole model", "warm-up"): 2, ("the whole model", "capture"): 4}


def test_recorder_of_another_rank_does_nothing(clock, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    recorder = CaptureRecorder.of_rank_0()
    recorder.sample("start")
    run(recorder, clock, *LAYERS[0], 1)
    recorder.end()
    assert not recorder.active and not recorder.memory and not recorder.seconds


def test_progress_bar_in_a_terminal(clock, monkeypatch):
    tqdm = ModuleType("tqdm")
    tqdm.tqdm = Bar  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm", tqdm)
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: True)))
    recorder = CaptureRecorder(active=True)
    recorder.expect(2, warmup_iters=1)
    for _ in range(2):
        run(recorder, clock, "one", "forward", 1)
    recorder.end()
    assert (Bar.last.total, Bar.last.done) == (4, 1)
    assert Bar.last.shown == ["one, forward warm-up", "one, forward warm-up", "closed"]


def test_progress_in_the_log(clock, caplog):
    recorder = CaptureRecorder(active=True)
    recorder.expect(50, warmup_iters=1)
    with caplog.at_level("INFO"):
        for _ in range(70):
            run(recorder, clock, "one", "forward", 0.5)
    assert caplog.messages == [
        "CUDA graph capture: pass 32 of 100, one, forward warm-up",
        "CUDA graph capture: pass 63 of 100, one, forward capture",
    ]
