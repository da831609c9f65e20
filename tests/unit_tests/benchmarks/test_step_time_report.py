"""Variants compared with each other: bits, ratios, and the table."""

from typing import Any

import pytest

from benchmarks._step_time import report
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
def test_steps_are_equal_up_to_the_first_that_differs(numbers, same):
    assert report.equal_steps(numbers, SAME) == same


def test_ratios_are_to_eager_to_the_full_iteration_and_to_what_is_computed():
    times = {"eager": timed(8.0), "native": timed(4.0), "full_iteration": timed(2.0)}
    other = {"compute_alone": timed(1.0, LATER)}
    native = rows(times | other, {"eager": profiled(1.6)})["native"]
    assert native["ratio_to_compute_alone"] == 4.0
    assert native["ratio_to_eager"] == 0.5
    assert native["ratio_to_full_iteration"] == 2.0
    assert native["ratio_to_compute"] == 2.5


def test_a_ratio_to_what_was_not_measured_is_none():
    native = rows({"native": timed(4.0)})["native"]
    assert {native[f"ratio_to_{other}"] for other in ("eager", "full_iteration", "compute", "compute_alone")} == {None}
    assert native["reference"] is native["equal_steps"] is None


def test_with_the_optimizers_graph_others_with_it_are_compared_with():
    other = [["0x1p+3", "0x1p+1"]] * 4
    results = {
        "eager": timed(8.0),
        "full_iteration": timed(1.0),
        "full_iteration+optimizer": timed(2.0, other),
        "native+optimizer": timed(5.0, other),
    }
    native = rows(results)["native+optimizer"]
    assert native["ratio_to_full_iteration"] == 2.5
    assert native["ratio_to_eager"] is None
    assert native["reference"] == "full_iteration+optimizer"
    assert report.failures(native) == []


def test_a_step_that_differs_from_the_reference_is_a_failure():
    native = rows({"eager": timed(8.0), "native": timed(4.0, LATER)})["native"]
    assert (native["equal_steps"], native["steps"], native["reference"]) == (2, 4, "eager")
    assert report.failures(native) == ["differs from eager in step 3"]


def test_a_run_that_ended_early_differs_from_a_longer_reference():
    native = rows({"eager": timed(8.0, SAME[:3]), "native": timed(4.0)})["native"]
    assert report.failures(native) == ["differs from eager in step 4"]


def test_a_training_without_collectives_has_nothing_to_equal():
    alone = rows({"eager": timed(8.0), "compute_alone": timed(1.0, LATER)})["compute_alone"]
    assert alone["reference"] is alone["equal_steps"] is None
    assert report.failures(alone) == []


def test_ddp_is_compared_with_ddp():
    found = rows({"eager": timed(8.0), "ddp": timed(8.0, LATER), "ddp_graphs": timed(4.0, LATER)})
    assert found["ddp"]["reference"] is None
    assert found["ddp_graphs"]["reference"] == "ddp"
    assert report.failures(found["ddp_graphs"]) == []


def test_a_profiled_run_that_computes_otherwise_is_a_failure():
    native = rows({"native": timed(4.0)}, {"native": profiled(numbers=LATER)})["native"]
    assert native["repeatable"] is False
    assert report.failures(native) == ["two runs differ"]


def test_a_profiled_run_may_be_shorter_than_the_timed_one():
    native = rows({"native": timed(4.0)}, {"native": profiled(numbers=SAME[:3])})["native"]
    assert native["repeatable"] is True
    assert native["profile"] == {"python_calls": 7}


def test_what_failed_has_its_error_and_no_figures():
    found = rows({"eager": {"error": "rank 1: Traceback\nValueError: too large\n"}, "native": timed(4.0)})
    assert found["eager"].keys() == {"variant", "error"}
    assert report.failures(found["eager"]) == ["ValueError: too large"]
    assert found["native"]["reference"] is None


def test_errors_name_files_without_their_folders():
    error = 'File "/home/me/a-b/lib/python3.12/worker.py", line 3, in train\nValueError: 3 / 4 of ./a/b not in /no/such'
    native = rows({"native": timed(4.0)}, {"native": {"error": error}})["native"]
    shown = 'File "worker.py", line 3, in train\nValueError: 3 / 4 of ./a/b not in such'
    assert native["profile_error"] == shown
    assert rows({"te": {"error": error}})["te"]["error"] == shown


def test_a_failed_profile_is_a_failure():
    native = rows({"native": timed(4.0)}, {"native": {"error": "exit code 1\nout of memory"}})["native"]
    assert native["ms"] == 4.0
    assert report.failures(native) == ["out of memory"]


def test_the_table_has_a_line_for_each_variant():
    results = {"eager": timed(8.0), "native": timed(4.0, LATER), "te": {"error": "it broke"}}
    found = rows(results, {"native": profiled(numbers=LATER)})
    header, eager, native, te = report.table(list(found.values())).splitlines()
    assert header.split()[:5] == ["variant", "ms", "/full", "it.", "/eager"]
    assert eager.split()[:4] == ["eager", "8.0", "-", "1.000"]
    assert native.split()[:4] == ["native", "4.0", "-", "0.500"]
    assert "2/4 eager" in native and native.endswith("differs from eager in step 3")
    assert te.startswith("te") and te.endswith("it broke")


def test_what_the_gpu_did_is_said_of_what_was_profiled():
    kinds = {"matrix products": 30.04, "other": 1.0}
    found: list[dict[str, Any]] = [
        {"variant": "a", "profile": {"kinds": kinds, "idle_ms": 2.0, "nccl_alone_ms": 0.5}},
        {"variant": "b"},
    ]
    assert report.kinds_of_kernels(found) == [
        "a: matrix products 30.0, other 1.0; idle 2.0, collectives alone 0.5",
    ]
