"""Starts ``compare_runs.py`` on ranks of its own: the fixture of the tests, and the function behind it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

COMPARE = Path(__file__).with_name("compare_runs.py")
TIMEOUT = 900  # seconds


def name_of(case: dict[str, Any]) -> str:
    """Name a case by what it sets."""
    return " ".join(f"{key}={'+'.join(value) if isinstance(value, list) else value}" for key, value in case.items())


def launch(
    cases: Sequence[dict[str, Any]],
    *options: str,
    ranks: int,
    folder: Path,
    environment: dict[str, str] | None = None,
) -> tuple[subprocess.CompletedProcess, list[dict[str, Any]]]:
    """Train ``cases`` both ways on ``ranks`` new processes.

    Args:
        cases: Keyword arguments of ``training.Case``, with ``control`` for one of ``controls.CONTROLS``.
        options: Further arguments of ``compare_runs.py``.
        ranks: Processes.
        folder: An existing folder for the cases and their results.
        environment: Variables to set beside this process's own.

    Returns:
        The ended launcher with its output, and the results so far, in the order of the cases.
    """
    (folder / "cases.json").write_text(json.dumps(cases))
    results = folder / "results.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    files = ["--cases", str(folder / "cases.json"), "--output", str(results)]
    own = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(
        [*torchrun, str(COMPARE), *files, *options],
        env=os.environ | own | (environment or {}),
        timeout=TIMEOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done, json.loads(results.read_text()) if results.exists() else []


@pytest.fixture(scope="session")
def compare_runs(tmp_path_factory) -> Callable[..., list[dict[str, Any]]]:
    """A function that trains cases both ways in new processes and returns the results, one for each case."""

    def run(
        cases: Sequence[dict[str, Any]], *options: str, ranks: int = 2, environment: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("compare_runs")
        done, results = launch(cases, *options, ranks=ranks, folder=folder, environment=environment)
        stopped_at_error = "--stop-at-error" in options and results
        assert done.returncode == 0 or stopped_at_error, done.stdout[-3000:] + done.stderr[:6000] + done.stderr[-6000:]
        return results

    return run
