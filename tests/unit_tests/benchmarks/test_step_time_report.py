"""Test step_time.py: comparison of variants and launches."""

from typing import Any

import pytest

from benchmarks._step_time import report
from benchmarks._step_time.results import over_launches
from benchmarks._step_time.variants import variant

SAME = [["0x1p+0", "0x1p+1"]] * 4
LATER = [*SAME[:2], ["0x1p+0", "0x1.8p+1"], SAME[3]]


def timed(ms: float, numbers: list = SAME) -> dict[str, Any]:
    return {"event": "ended", "run": 0, "ms": ms, "numbers": numbers, "graphs": 0, "capture_seconds": 0.0}


def profiled(compute: float | None = None, numbers: list = SAME) -> dict[str, Any]:
    profile: dict[str, Any] = {"python_calls": 7}
    return {"numbers": numbers, "profile": profile if compute is None else {**profile, "compute_ms": compute}}


def rows(results: dict[str, Any], profiles: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    found = report.rows([variant(name) for name in results], results, profiles or {})
    return {row["variant"]: row for row in found}


@pytest.mark.parametrize(
    ("numbers", "same"), [(SAME, 4), (LATER, 2), ([["0x1p+0", None], *SAME[1:]], 0), (SAME[:3], 3)]
)
def test_equal_steps_end_at_the_first_difference(numbers, same):
    assert report.equal_steps(numbers, SAME) == same


def test_ratios_to_other_variants():
    times = {"eager": timed(8.0), "native": timed(4.0), "full_iteration": timed(2.0)}
    other = {"compute_alone": timed(1.0, LATER)}
    native = rows(times | other, {"eager": profiled(1.6)})["native"]
    assert native["ratio_to_compute_alone"] == 4.0
    assert native["ratio_to_eager"] == 0.5
    assert native["ratio_to_full_iteration"] == 2.0
    assert native["ratio_to_compute"] == 2.5


def test_step_different_from_reference_fails():
    native = rows({"eager": timed(8.0), "native": timed(4.0, LATER)})["native"]
    assert (native["equal_steps"], native["steps"], native["reference"]) == (2, 4, "eager")
    assert report.failures(native) == ["differs from eager in step 3"]


def test_different_profiled_run_fails():
    native = rows({"native": timed(4.0)}, {"native": profiled(numbers=LATER)})["native"]
    assert native["repeatable"] is False
    assert report.failures(native) == ["two runs differ"]


def launch(ms, ratio, equal_steps=4, **more):
    measured = {"ms": ms, "ratio_to_full_iteration": ratio, "ratio_to_eager": None, "ratio_to_compute": None}
    return {"variant": "native", **measured, "capture_seconds": ms / 10, "equal_steps": equal_steps, "steps": 4, **more}


def test_launches_are_combined_by_median_and_fewest_equal_steps():
    found = over_launches([launch(8.0, 1.2, profile={"launches": 3}), launch(10.0, 0.8, 2), launch(9.0, 0.9, 3)])
    assert (found["ms"], found["ratio_to_full_iteration"], found["capture_seconds"]) == (9.0, 0.9, 0.9)
    assert found["ratio_to_eager"] is None
    assert found["equal_steps"] == 2
    assert found["profile"] == {"launches": 3}
    assert [each["ms"] for each in found["launches"]] == [8.0, 10.0, 9.0]


def test_failure_in_any_launch_is_a_failure():
    assert over_launches([launch(8.0, 1.0), {"variant": "native", "error": "why"}])["error"] == "why"
