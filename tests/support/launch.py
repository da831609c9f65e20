"""The fixture that runs ``compare_runs.py`` on ranks of its own."""

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


@pytest.fixture(scope="session")
def compare_runs(tmp_path_factory) -> Callable[..., list[dict[str, Any]]]:
    """A function that trains cases both ways in new processes and returns the results, one for each case."""

    def run(
        cases: Sequence[dict[str, Any]], *options: str, ranks: int = 2, environment: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("compare_runs")
        (folder / "cases.json").write_text(json.dumps(cases))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        files = ["--cases", str(folder / "cases.json"), "--output", str(folder / "results.json")]
        done = subprocess.run(
            [*launch, str(COMPARE), *files, *options],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"} | (environment or {}),
            timeout=TIMEOUT,
            capture_output=True,
            text=True,
            check=False,
        )
        stopped = "--stop-at-error" in options and (folder / "results.json").exists()
        assert done.returncode == 0 or stopped, done.stdout[-3000:] + done.stderr[-6000:]
        return json.loads((folder / "results.json").read_text())

    return run
