"""The fixture that runs ``compare_runs.py`` on ranks of its own."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

COMPARE = Path(__file__).with_name("compare_runs.py")
TIMEOUT = 900  # seconds
CASES_PER_PROCESS = 12


def name_of(case: dict[str, Any]) -> str:
    """Name a case by what it sets."""
    return " ".join(f"{key}={'+'.join(value) if isinstance(value, list) else value}" for key, value in case.items())


@pytest.fixture(scope="session")
def compare_runs(tmp_path_factory) -> Callable[..., list[dict[str, Any]]]:
    """A function that trains cases both ways in new processes and returns the results, one for each case."""

    def run(
        cases: Sequence[dict[str, Any]], *options: str, ranks: int = 2, environment: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        # A process that trains many models has, rarely and under load, died in a gloo thread (SIGSEGV in malloc;
        # the cause is not known). Fewer cases a process, and one more try after such a death; its results count as any.
        parts = [cases[i : i + CASES_PER_PROCESS] for i in range(0, len(cases), CASES_PER_PROCESS)]
        return [result for part in parts for result in run_part(part, options, ranks, environment)]

    def run_part(cases, options, ranks, environment) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("compare_runs")
        (folder / "cases.json").write_text(json.dumps(cases))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        files = ["--cases", str(folder / "cases.json"), "--output", str(folder / "results.json")]
        for tries_left in (1, 0):
            done = subprocess.run(
                [*launch, str(COMPARE), *files, *options],
                env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"} | (environment or {}),
                timeout=TIMEOUT,
                capture_output=True,
                text=True,
                check=False,
            )
            if not tries_left or "exitcode: -11" not in done.stderr:
                break
            warnings.warn("a rank died of SIGSEGV; its cases are run again", stacklevel=2)
        stopped = "--stop-at-error" in options and (folder / "results.json").exists()
        assert done.returncode == 0 or stopped, done.stdout[-3000:] + done.stderr[-6000:]
        return json.loads((folder / "results.json").read_text())

    return run
