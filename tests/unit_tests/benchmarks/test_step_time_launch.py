"""Test step_time.py: failed and hung runs are reported, and the remaining runs start in a new launch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks._step_time import launch
from benchmarks._step_time.plan import Run

WORKER = """
import json, os, sys, time
plan, results = sys.argv[1:3]
def tell(run, event, **more):
    with open(results, "a") as file:
        file.write(json.dumps({"run": run["number"], "event": event, **more}) + chr(10))
for run in json.load(open(plan)):
    tell(run, "started")
    if run["flags"] == ["raises"]:
        tell(run, "failed", error="rank 0: ValueError: no")
        os._exit(1)
    if run["flags"] == ["dies"]:
        print("last words", flush=True)
        os._exit(3)
    if run["flags"] == ["hangs"]:
        time.sleep(600)
    tell(run, "ended", seconds=1)
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Return a function that launches runs with the given flags and a fake worker.

    The flag selects the behavior of the worker, for example ``hangs``. The function returns the number of each run, and
    its error or last event, in order of arrival.
    """
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(launch, "WORKER", worker)
    popen = subprocess.Popen

    def without_torchrun(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return popen([sys.executable, "-S", *command[command.index(str(worker)) :]], **options)

    def run(
        *flags: str, stall_seconds: float = 600.0, profiled: bool = True, torchrun: bool = False
    ) -> list[tuple[int, str]]:
        monkeypatch.setattr(subprocess, "Popen", popen if torchrun else without_torchrun)
        runs: list[Run] = []
        for profile in (False, True) if profiled else (False,):
            for number, flag in enumerate(flags):
                name = f"variant{number}"
                runs.append(Run(len(runs), "A:--x", name, [flag], {}, False, 20, profile))
        shown: list[tuple[int, str]] = []

        def show(run: Run, result: launch.Result) -> None:
            shown.append((run.number, result["error"] if "error" in result else result["event"]))

        launch.run_plan(runs, ranks=1, on_cpu=False, logs=tmp_path, stall_seconds=stall_seconds, show=show)
        return shown

    return run


def test_failed_runs_are_not_profiled(train):
    shown = train("passes", "raises", "passes")
    assert shown == [(0, "ended"), (1, "rank 0: ValueError: no"), (2, "ended"), (3, "ended"), (5, "ended")]


def test_dead_ranks_are_reported_with_the_end_of_their_log(train):
    (number, error), after = train("dies", "passes", profiled=False, torchrun=True)
    assert number == 0
    assert error.startswith("exit code 1\n") and error.endswith("last words")
    assert after == (1, "ended")


def test_hung_run_is_ended_and_reported(train):
    (number, error), after = train("hangs", "passes", stall_seconds=3.0, profiled=False)
    assert number == 0
    assert error.startswith("no progress for 3 s")
    assert after == (1, "ended")


def test_nccl_variables_are_set_when_processes_start(tmp_path, monkeypatch):
    """Check that runs with different NCCL variables use separate launches, because NCCL reads them only once."""
    started: list[tuple[str | None, list[str]]] = []
    popen = subprocess.Popen
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)

    def starts(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        plan = json.loads(Path(command[-3]).read_text())
        started.append((options["env"].get("NCCL_MAX_CTAS"), [run["variant"] for run in plan]))
        return popen([sys.executable, "-S", *command[-4:]], **options)

    monkeypatch.setattr(launch, "WORKER", worker)
    monkeypatch.setattr(subprocess, "Popen", starts)
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    few = {"NCCL_MAX_CTAS": "8"}
    runs = [
        Run(number, "A", variant, [], environment, False, 20, False)
        for number, (variant, environment) in enumerate({"eager": {}, "few": few, "native": {"OTHER": "1"}}.items())
    ]
    launch.run_plan(runs, ranks=1, on_cpu=False, logs=tmp_path, stall_seconds=3.0, show=lambda *_: None)
    assert started == [(None, ["eager", "native"]), ("8", ["few"])]
