"""Starts ``compare_runs.py`` on ranks of its own: the fixture of the tests, and what is behind it.

On GPUs torchrun starts the ranks; without, they are forked.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.forked_ranks import OWN, ForkedRanks

COMPARE = Path(__file__).with_name("compare_runs.py")
FAULTS = Path(__file__).with_name("inject_faults.py")
TIMEOUT = 3600  # seconds: none that works takes so long, on a busy machine either


def name_of(case: Mapping[str, Any]) -> str:
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
    """Train ``cases`` both ways on ``ranks`` new processes of torchrun.

    Args:
        cases: Keyword arguments of ``case.Case``, with ``control`` for one of ``controls.CONTROLS``.
        options: Further arguments of ``compare_runs.py``.
        ranks: Processes.
        folder: An existing folder for the cases and their results.
        environment: Variables to set beside this process's own.

    Returns:
        The ended launcher with its output, and the results so far, in the order of the cases.
    """
    done = _torchrun(COMPARE, [*_write(cases, folder), *options], ranks, environment)
    return done, _read(folder)


def inject_faults(
    *options: str, ranks: int, folder: Path, environment: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run ``inject_faults.py`` on ``ranks`` new processes and return its results.

    Raises:
        AssertionError: a rank died; with the end of what it wrote.
    """
    output = folder / "results.json"
    status, shown = _run(FAULTS, ["--output", str(output), *options], ranks, folder, environment)
    assert status == 0, shown
    results: list[dict[str, Any]] = json.loads(output.read_text())["results"]
    return results


def _run(
    script: Path, arguments: Sequence[str], ranks: int, folder: Path, environment: dict[str, str] | None
) -> tuple[int, str]:
    """Run ``script`` on ``ranks`` new processes; return the exit status and the end of what they wrote."""
    if torch.cuda.is_available():
        done = _torchrun(script, arguments, ranks, environment)
        return done.returncode, done.stdout[-3000:] + done.stderr[:6000] + done.stderr[-6000:]
    forked = ForkedRanks([str(script), *arguments], folder / "log", ranks, environment)
    return forked.ended(TIMEOUT), forked.log_tail()


def _torchrun(
    script: Path, arguments: Sequence[str], ranks: int, environment: dict[str, str] | None
) -> subprocess.CompletedProcess:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*launcher, str(script), *arguments],
        env=os.environ | OWN | (environment or {}),
        timeout=TIMEOUT,
        capture_output=True,
        text=True,
        check=False,
    )


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
        ranks: These.
    """

    def __init__(self, folder: Path) -> None:
        jobs = folder / "jobs"
        os.mkfifo(jobs)
        self._jobs = os.fdopen(os.open(jobs, os.O_RDWR), "w")  # opens though nobody reads yet
        self.ranks = ForkedRanks([str(COMPARE), "--serve", str(jobs)], folder / "log")

    def run(self, cases: Sequence[dict[str, Any]], options: Sequence[str], folder: Path) -> list[dict[str, Any]]:
        """Train ``cases`` both ways and return their results.

        Raises:
            AssertionError: the ranks died; with the end of what they wrote.
        """
        self._jobs.write(" ".join([*_write(cases, folder), *options]) + "\n")
        self._jobs.flush()
        end = time.monotonic() + TIMEOUT
        while len(results := _read(folder)) < len(cases):
            assert self.ranks.running() and time.monotonic() < end, self.ranks.log_tail()
            time.sleep(0.1)
        return results

    def close(self) -> None:
        """End the ranks, between two jobs.

        Raises:
            AssertionError: they did not end by themselves.
        """
        self._jobs.close()
        self.ranks.ended(TIMEOUT)


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
            if not servers or not servers[-1].ranks.running():
                servers.append(Server(tmp_path_factory.mktemp("server")))
            return servers[-1].run(cases, options, folder)
        status, shown = _run(COMPARE, [*_write(cases, folder), *options], ranks, folder, environment)
        results = _read(folder)
        stopped_at_error = "--stop-at-error" in options and results
        assert status == 0 or stopped_at_error, shown
        return results

    yield run
    for server in servers:
        server.close()
