"""Several launches of step_time: medians, what lies between them, and the worst of what was computed."""

import json
import sys
from unittest import mock

import pytest
import torch

from benchmarks import step_time
from benchmarks._step_time.spread import over_launches, sentence


def row(ms, ratio, equal_steps=4, **more):
    measured = {"ms": ms, "ratio_to_full_iteration": ratio, "ratio_to_eager": None, "ratio_to_compute": None}
    return {"variant": "native", **measured, "capture_seconds": ms / 10, "equal_steps": equal_steps, "steps": 4, **more}


def test_times_and_ratios_are_medians_of_launches():
    found = over_launches([row(8.0, 1.2, profile={"launches": 3}), row(10.0, 0.8), row(9.0, 0.9)])
    assert (found["ms"], found["ratio_to_full_iteration"], found["capture_seconds"]) == (9.0, 0.9, 0.9)
    assert found["ratio_to_eager"] is None
    assert found["profile"] == {"launches": 3}
    assert [launch["ms"] for launch in found["launches"]] == [8.0, 10.0, 9.0]


def test_the_launch_that_differs_soonest_is_what_counts():
    assert over_launches([row(8.0, 1.0), row(8.0, 1.0, 2), row(8.0, 1.0, 3)])["equal_steps"] == 2


def test_one_launch_is_reported_as_it_is():
    assert over_launches([row(8.0, 1.0)]) == row(8.0, 1.0)


def test_a_run_that_failed_in_any_launch_has_failed():
    assert over_launches([row(8.0, 1.0), {"variant": "native", "error": "why"}])["error"] == "why"


def test_the_sentence_says_between_which_ratios_launches_lie():
    found = over_launches([row(8.0, 1.2), row(10.0, 0.8)])
    assert sentence(found) == "native: 0.800 to 1.200 of the full iteration in 2 launches"
    assert sentence(row(8.0, 1.0)) == ""
    assert sentence(over_launches([row(8.0, 1.0), row(9.0, 1.0)])) == ""  # compared with itself


@pytest.fixture
def benchmark(tmp_path, monkeypatch, capsys):
    """Runs step_time with launches whose times are given, and returns what it wrote, printed and started."""

    def run(times, *arguments):
        launches = []

        def run_plan(runs, *, show, logs, **options):
            assert logs.is_dir()
            launches.append([(each.variant, each.profiled) for each in runs])
            for each in runs:
                result = {"ms": times[len(launches) - 1][each.variant], "left_mib": 0, "numbers": [["a", "b"]] * 2}
                show(each, {"profile": {"python_calls": 1}, "numbers": result["numbers"]} if each.profiled else result)

        output = tmp_path / "it.json"
        monkeypatch.setattr(sys, "argv", ["step_time.py", "--output", str(output), "--gpus", "2", *arguments])
        monkeypatch.setattr(step_time, "run_plan", run_plan)
        with mock.patch.object(torch.cuda, "is_available", return_value=False):
            assert step_time.main() == 0
        return json.loads(output.read_text())["configurations"]["B"], capsys.readouterr().out, launches

    return run


def test_the_processes_are_started_as_often_as_asked_and_profiled_once(benchmark):
    times = [{"eager": 8.0, "native": 4.0}, {"eager": 10.0, "native": 2.0}, {"eager": 9.0, "native": 3.6}]
    chosen = ("--configurations", "B", "--variants", "eager", "native", "--launches", "3")
    (eager, native), printed, launches = benchmark(times, *chosen)
    assert (eager["ms"], native["ms"], native["ratio_to_eager"]) == (9.0, 3.6, 0.4)
    assert "[8/8] B, native: 3.6 ms" in printed
    assert "native: 0.200 to 0.500 of eager in 3 launches" in printed
    timed = [("eager", False), ("native", False)]
    assert launches == [[*timed, ("eager", True), ("native", True)], timed, timed]


def test_no_launch_at_all_is_refused(capsys):
    with pytest.raises(SystemExit):
        step_time.parse(["--launches", "0"])
    assert "--launches must be at least 1" in capsys.readouterr().err
