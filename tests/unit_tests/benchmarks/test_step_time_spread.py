"""Several launches of step_time: medians, what lies between them, and the worst of what was computed."""

from benchmarks._step_time.spread import over_launches


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


def test_a_run_that_failed_in_any_launch_has_failed():
    assert over_launches([row(8.0, 1.0), {"variant": "native", "error": "why"}])["error"] == "why"
