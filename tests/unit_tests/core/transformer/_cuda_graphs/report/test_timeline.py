"""timeline: when passes began and ended, with a clock of the test's."""

from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from megatron.core.transformer._cuda_graphs.report import timeline as module
from megatron.core.transformer._cuda_graphs.report.timeline import Timeline

ORDER = [(0, 0, "forward"), (1, 0, "forward"), (1, 0, "backward"), (0, 0, "backward")]
WHERE = [("one", "forward"), ("two", "forward"), ("two", "backward"), ("one", "backward")]


class Watched:
    """A timeline with a clock that only the test advances; memory grows by a byte a look."""

    def __init__(self, monkeypatch):
        self.now = 10.0
        looks = {name: count(unit, unit) for name, unit in (("memory_allocated", 1), ("memory_reserved", 100))}
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        for name, look in looks.items():
            monkeypatch.setattr(torch.cuda, name, partial(next, look))
        self.timeline = Timeline()
        self.shown: list[str] = []
        self.totals: list[int | None] = []

        def progress(total):
            self.totals.append(total)
            return SimpleNamespace(begin=self.shown.append, close=lambda: self.shown.append("closed"))

        monkeypatch.setattr(module, "Progress", progress)

    def run(self, where, seconds, wait=0.0):
        self.timeline.begin(*where)
        self.timeline.wait(lambda: self.advance(wait))
        self.advance(seconds)

    def advance(self, seconds):
        self.now += seconds


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


@pytest.fixture
def capturing(monkeypatch):
    state = SimpleNamespace(on=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.on)
    return state


@pytest.mark.usefixtures("capturing")
class TestLayers:
    def test_passes_of_the_last_iteration_are_captured(self, watched):
        watched.timeline.expect(ORDER, ["first", "second"], warm_ups=2)
        watched.timeline.begin("before the first layer")
        watched.timeline.wait(lambda: watched.advance(4))
        watched.advance(100)  # counts for no pass
        for seconds in (1, 2, 8):
            for where in WHERE:
                watched.run(where, seconds, wait=0.5)
        watched.timeline.end()
        passes = watched.timeline.passes
        assert [(each.layer, each.micro_batch, each.kind) for each in passes] == ORDER
        assert [each.seconds for each in passes] == [8] * 4
        start = 4 + 100 + 4 * 1.5 + 4 * 2.5
        assert [each.start for each in passes] == [start + 8.5 * place + 0.5 for place in range(4)]
        assert dict(watched.timeline.warm_up_seconds) == {0: 2 * (1 + 2), 1: 2 * (1 + 2)}
        assert watched.timeline.waited == 4 + 12 * 0.5

    def test_memory_is_looked_at_at_the_start_of_warm_up_and_of_each_captured_pass(self, watched):
        watched.timeline.sample("start")
        watched.timeline.expect(ORDER, ["first", "second"], warm_ups=2)
        for where in WHERE * 3:
            watched.run(where, 1)
        watched.timeline.end()
        samples = watched.timeline.samples
        assert [sample.phase for sample in samples] == ["start", "warm-up", *["capture"] * 4, "captured"]
        assert [sample.allocated for sample in samples] == list(range(1, 8))
        assert [sample.reserved for sample in samples] == list(range(100, 800, 100))

    def test_progress_names_layer_and_phase(self, watched):
        watched.timeline.expect(ORDER, ["first", "second"], warm_ups=1)
        for where in WHERE * 2:
            watched.run(where, 1)
        watched.timeline.end()
        assert watched.totals == [8]
        assert watched.shown == [
            *("first, forward warm-up", "second, forward warm-up", "second, backward warm-up"),
            *("first, backward warm-up", "first, forward capture", "second, forward capture"),
            *("second, backward capture", "first, backward capture", "closed"),
        ]

    def test_a_failed_capture_takes_the_progress_away(self, watched):
        watched.timeline.expect(ORDER, ["first", "second"], warm_ups=1)
        watched.run(WHERE[0], 1)
        watched.timeline.end()
        watched.timeline.end()
        assert watched.shown == ["first, forward warm-up", "closed"]


def test_what_the_passes_of_the_whole_model_wait_counts_for_none(watched, capturing):
    for seconds in (1, 2):
        for where in ("before forward", "forward", "backward"):
            watched.run(("the whole model", where), seconds, wait=0.25)
            watched.timeline.wait(lambda: watched.advance(0.5))
            watched.advance(seconds)
        capturing.on = True
    watched.timeline.end()
    assert [(each.layer, each.kind, each.seconds) for each in watched.timeline.passes] == [
        (None, "forward", 4),
        (None, "backward", 4),
    ]
    assert dict(watched.timeline.warm_up_seconds) == {None: 4}
    assert watched.timeline.waited == 6 * (0.25 + 0.5)
    assert watched.totals == [None]
    assert watched.shown[-2:] == ["the whole model, backward capture", "closed"]
