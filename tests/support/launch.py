"""The fixture that runs ``compare_runs.py`` on ranks of its own."""

import json
import os
import re
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
DEATHS = r"exitcode\s*: -(6|11)\b|Fatal Python error: (Aborted|Segmentation fault)"


def name_of(case: dict[str, Any]) -> str:
    """Name a case by what it sets."""
    return " ".join(f"{key}={'+'.join(value) if isinstance(value, list) else value}" for key, value in case.items())


@pytest.fixture(scope="session")
def compare_runs(tmp_path_factory) -> Callable[..., list[dict[str, Any]]]:
    """A function that trains cases both ways in new processes and returns the results, one for each case."""

    def run(
        cases: Sequence[dict[str, Any]], *options: str, ranks: int = 2, environment: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        # A process that trains many models died now and then, under load, of heap corruption in a gloo thread: a core
        # dump had the shared pointer of a gloo UnboundBuffer in memory that malloc held for free. The cause is not
        # known. So few cases a process, and after such a death the rest, from the case that it died in, in another.
        parts = [cases[i : i + CASES_PER_PROCESS] for i in range(0, len(cases), CASES_PER_PROCESS)]
        return [result for part in parts for result in run_part(part, options, ranks, environment or {})]

    def run_part(cases, options, ranks, environment) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = []
        died_in: int | None = None
        while len(results) < len(cases):
            done, more = run_process(cases[len(results) :], options, ranks, environment)
            results += more
            if done.returncode == 0 or ("--stop-at-error" in options and more):
                return results
            death = re.search(DEATHS, done.stderr)
            assert death and died_in != len(results), done.stdout[-3000:] + done.stderr[:6000] + done.stderr[-6000:]
            died_in = len(results)
            warnings.warn(f"a rank died ({death[0]}) after {died_in} of {len(cases)} cases; it goes on", stacklevel=2)
        return results

    def run_process(cases, options, ranks, environment) -> tuple[subprocess.CompletedProcess, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("compare_runs")
        (folder / "cases.json").write_text(json.dumps(cases))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        files = ["--cases", str(folder / "cases.json"), "--output", str(folder / "results.json")]
        own = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONFAULTHANDLER": "1"}
        done = subprocess.run(
            [*launch, str(COMPARE), *files, *options],
            env=os.environ | own | environment,
            timeout=TIMEOUT,
            capture_output=True,
            text=True,
            check=False,
        )
        results = folder / "results.json"
        return done, json.loads(results.read_text()) if results.exists() else []

    return run
