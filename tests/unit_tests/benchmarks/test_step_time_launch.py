"""Test step_time.py: launches with different NCCL variables."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks._step_time import launch
from benchmarks._step_time.plan import Run

WORKER = """
import json, sys
plan, results = sys.argv[1:3]
def tell(run, event, **more):
    with open(results, "a") as file:
        file.write(json.dumps({"run": run["number"], "event": event, **more}) + chr(10))
for run in json.load(open(plan)):
    tell(run, "started")
    tell(run, "ended", seconds=1)
"""


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
