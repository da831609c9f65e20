"""Starts ``compare_runs.py`` on ranks of its own: the fixture of the tests, and what is behind it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

COMPARE = Path(__file__).with_name("compare_runs.py")
FAULTS = Path(__file__).with_name("inject_faults.py")
TIMEOUT = 900  # seconds
OWN = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONFAULTHANDLER": "1"}


def name_of(case: dict[str, Any]) -> str:
    """Name a case by what it sets."""
    values = {key: "+".join(map(str, value)) if isinstance(value, list) else value for key, value in case.items()}
    return " ".join(f"{key}={value}" for key, value in values.items())


def launch(
    cases: Sequence[dict[str, Any]],
    *options: str,
    ranks: int,
    folder: Path,
    environment: dict[str, str] | None = None,
) -> tuple[subprocess.CompletedProcess, list[dict[str, Any]]]:
    """Train ``cases`` both ways on ``ranks`` new processes.

    Args:
        cases: Keyword arguments of ``case.Case``, with ``control`` for one of ``controls.CONTROLS``.
        options: Further arguments of ``compare_runs.py``.
        ranks: Processes.
        folder: An existing folder for the cases and their results.
        environment: Variables to set beside this process's own.

    Returns:
        The ended launcher with its output, and the results so far, in the order of the cases.
    """
    done = subprocess.run(
        [*_torchrun(ranks), *_write(cases, folder), *options],
        env=os.environ | OWN | (environment or {}),
        timeout=TIMEOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done, _read(folder)


def inject_faults(
    *options: str, ranks: int, folder: Path, environment: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run ``inject_faults.py`` on ``ranks`` new processes and return its results.

    Raises:
        AssertionError: a rank died; with the end of what it wrote.
    """
    output = folder / "results.json"
    done = subprocess.run(
        [*_torchrun(ranks, FAULTS), "--output", str(output), *options],
        env=os.environ | OWN | (environment or {}),
        timeout=TIMEOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-6000:]
    results: list[dict[str, Any]] = json.loads(output.read_text())["results"]
    return results


def _torchrun(ranks: int, script: Path = COMPARE) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, str(script)]


def _write(cases: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    """Write ``cases`` to a file; return the arguments that name it and the file of results."""
    (folder / "cases.json").write_text(json.dumps(cases))
    return ["--cases", str(folder / "cases.json"), "--output", str(folder / "results.json")]


def _read(folder: Path) -> list[dict[str, Any]]:
    results = folder / "results.json"
    return json.loads(results.read_text()) if results.exists() else []


class Server:
    """Two CPU ranks that run one job after another.

    Attributes:
        process: Their launcher.
    """

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*_torchrun(2), "--serve"],
                env=os.environ | OWN,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def run(self, cases: Sequence[dict[str, Any]], options: Sequence[str], folder: Path) -> list[dict[str, Any]]:
        """Train ``cases`` both ways and return their results.

        Raises:
            AssertionError: the ranks died; with the end of what they wrote.
        """
        files = _write(cases, folder)
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join([*files, *options]) + "\n")
        self.process.stdin.flush()
        end = time.monotonic() + TIMEOUT
        while len(results := _read(folder)) < len(cases):
            ended = self.process.poll() is not None or time.monotonic() > end
            assert not ended, self._log.read_text(errors="replace")[-12000:]
            time.sleep(0.1)
        return results

    def close(self) -> None:
        """End the ranks, between two jobs."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()


@pytest.fixture(scope="session")
def compare_runs(tmp_path_factory) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """A function that trains cases both ways in other processes and returns the results, one for each case.

    Without a GPU two ranks serve all calls of the session, except those whose first error ends the ranks.
    """
    servers: list[Server] = []

    def run(
        cases: Sequence[dict[str, Any]], *options: str, ranks: int = 2, environment: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("compare_runs")
        if not torch.cuda.is_available() and ranks == 2 and not environment and "--stop-at-error" not in options:
            if not servers or servers[-1].process.poll() is not None:
                servers.append(Server(tmp_path_factory.mktemp("server")))
            return servers[-1].run(cases, options, folder)
        done, results = launch(cases, *options, ranks=ranks, folder=folder, environment=environment)
        stopped_at_error = "--stop-at-error" in options and results
        assert done.returncode == 0 or stopped_at_error, done.stdout[-3000:] + done.stderr[:6000] + done.stderr[-6000:]
        return results

    yield run
    for server in servers:
        server.close()
