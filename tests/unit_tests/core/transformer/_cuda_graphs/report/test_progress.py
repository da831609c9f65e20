"""progress: a bar in a terminal, otherwise lines of the log now and then."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron.core.transformer._cuda_graphs.report import timeline
from megatron.core.transformer._cuda_graphs.report.timeline import Progress


class Bar:
    """``tqdm.tqdm``, which notes what it is told."""

    made: list["Bar"] = []

    def __init__(self, total, **_):
        self.total, self.done, self.shown, self.closed = total, 0, "", False
        self.made.append(self)

    def update(self, count):
        self.done += count

    def set_postfix_str(self, text, refresh):
        self.shown = text

    def close(self):
        self.closed = True


@pytest.fixture(autouse=True)
def _tqdm(monkeypatch):
    module = ModuleType("tqdm")
    module.tqdm = Bar  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm", module)
    monkeypatch.setattr(Bar, "made", [])


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(timeline, "sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: True)))


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timeline, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return SimpleNamespace(advance=lambda seconds: now.__setitem__(0, now[0] + seconds))


@pytest.mark.usefixtures("terminal")
def test_a_bar_in_a_terminal():
    shown = Progress(3)
    (bar,) = Bar.made
    assert bar.total == 3
    for number, what in enumerate(("layer 1", "layer 2", "layer 3")):
        shown.begin(what)
        assert (bar.shown, bar.done) == (what, number)
    shown.close()
    assert bar.closed


@pytest.mark.usefixtures("terminal")
def test_without_tqdm_there_are_lines(monkeypatch, caplog, clock):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    shown = Progress(2)
    clock.advance(31)
    with caplog.at_level("INFO"):
        shown.begin("layer 1, forward capture")
    assert caplog.messages == ["CUDA graph capture: pass 1 of 2, layer 1, forward capture"]


def test_lines_come_now_and_then(caplog, clock):
    shown = Progress(None)
    with caplog.at_level("INFO"):
        for _ in range(100):
            shown.begin("the whole model")
            clock.advance(1)
    shown.close()
    assert Bar.made == []
    assert [message.split(",")[0] for message in caplog.messages] == [
        "CUDA graph capture: pass 32",
        "CUDA graph capture: pass 63",
        "CUDA graph capture: pass 94",
    ]
