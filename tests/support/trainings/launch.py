"""Run ``compare_runs.py`` and ``inject_faults.py`` on separate ranks.

torchrun starts the ranks on GPUs; without a GPU they are forked.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.forked_ranks import OWN, ForkedRanks

from .gpus import GPUS

COMPARE = Path(__file__).with_name("compare_runs.py")
FAULTS = Path(__file__).with_name("inject_faults.py")
TIMEOUT = 3600  # seconds; longer than any run on a busy machine


def launch(
    cases: Sequence[dict[str, Any]],
    *options: str,
    ranks: int,
    folder: Path,
    environment: dict[str, str] | None = None,
) -> tuple[subprocess.CompletedProcess, list[dict[str, Any]]]:
    """Train ``cases`` eagerly and with graphs on ``ranks`` new torchrun processes.

    Args:
        cases: Arguments of ``Case.of``; ``control`` names one of ``controls.CONTROLS``.
        options: Additional arguments of ``compare_runs.py``.
        ranks: Number of processes.
        folder: Existing folder for the cases and their results.
        environment: Additional environment variables.

    Returns:
        The completed process with its output, and the available results in the order of the cases.
    """
    done = torchrun(COMPARE, [*_write(cases, folder), *options], ranks, environment)
    return done, _read(folder)


def inject_faults(
    *options: str, ranks: int, folder: Path, environment: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run ``inject_faults.py`` on ``ranks`` new processes and return its results.

    Raises:
        AssertionError: A rank died. The message includes the end of the output.
    """
    output = folder / "results.json"
    status, shown = _run(FAULTS, ["--output", str(output), *options], ranks, folder, environment)
    assert status == 0, shown
    results: list[dict[str, Any]] = json.loads(output.read_text())["results"]
    return results


def _run(
    script: Path, arguments: Sequence[str], ranks: int, folder: Path, environment: dict[str, str] | None
) -> tuple[int, str]:
    """Run ``script`` on ``ranks`` new processes; return the exit status and the end of the output."""
    if GPUS:
        done = torchrun(script, arguments, ranks, environment)
        return done.returncode, done.stdout[-3000:] + done.stderr[:6000] + done.stderr[-6000:]
    forked = ForkedRanks([str(script), *arguments], folder / "log", ranks, environment)
    return forked.ended(TIMEOUT), forked.log_tail()


def torchrun(
    script: Path, arguments: Sequence[str], ranks: int, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Run ``script`` on ``ranks`` processes of torchrun."""
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
    """Write ``cases`` to a file; return the arguments for this file and the results file."""
    (folder / "cases.json").write_text(json.dumps(cases))
    return ["--cases", str(folder / "cases.json"), "--output", str(folder / "results.json")]


def _read(folder: Path) -> list[dict[str, Any]]:
    results = folder / "results.json"
    return json.loads(results.read_text()) if results.exists() else []


class Server:
    """CPU ranks that run jobs one after the other."""

    def __init__(self, folder: Path, ranks: int) -> None:
        jobs = folder / "jobs"
        os.mkfifo(jobs)
        self._jobs = os.fdopen(os.open(jobs, os.O_RDWR), "w")  # opens before it has a reader
        self.ranks = ForkedRanks([str(COMPARE), "--serve", str(jobs)], folder / "log", ranks)

    def run(self, cases: Sequence[dict[str, Any]], options: Sequence[str], folder: Path) -> list[dict[str, Any]]:
        """Train ``cases`` eagerly and with graphs, and return the results.

        Raises:
            AssertionError: The ranks died. The message includes the end of the log.
        """
        self._jobs.write(" ".join([*_write(cases, folder), *options]) + "\n")
        self._jobs.flush()
        end = time.monotonic() + TIMEOUT
        while len(results := _read(folder)) < len(cases):
            assert self.ranks.running() and time.monotonic() < end, self.ranks.log_tail()
            time.sleep(0.02)
        return results

    def close(self) -> None:
        """Shut down the idle ranks.

        Raises:
            AssertionError: The ranks did not exit.
        """
        self._jobs.close()
        self.ranks.ended(TIMEOUT)


@pytest.fixture(scope="session")
def compare_runs(tmp_path_factory) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Return a function that trains cases eagerly and with graphs in other processes, and returns their results.

    Without a GPU, the same ranks serve all calls of the session, except calls with ``--stop-at-error``.
    """
    servers: dict[int, Server] = {}

    def run(
        cases: Sequence[dict[str, Any]], *options: str, ranks: int = 2, environment: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("compare_runs")
        if not GPUS and not environment and "--stop-at-error" not in options:
            if ranks not in servers or not servers[ranks].ranks.running():
                servers[ranks] = Server(tmp_path_factory.mktemp("server"), ranks)
            return servers[ranks].run(cases, options, folder)
        status, shown = _run(COMPARE, [*_write(cases, folder), *options], ranks, folder, environment)
        results = _read(folder)
        stopped_at_error = "--stop-at-error" in options and results
        assert status == 0 or stopped_at_error, shown
        return results

    yield run
    for server in servers.values():
        server.close()


@pytest.fixture(scope="session")
def trained(compare_runs) -> Callable[..., dict[str, Any]]:
    """Return a function that trains a case in a rank layout and caches its result for the session."""
    results: dict[str, dict[str, Any]] = {}

    def train(case: dict[str, Any], *options: str, ranks: int = 2) -> dict[str, Any]:
        key = json.dumps([case, options, ranks], sort_keys=True)
        if key not in results:
            (results[key],) = compare_runs([case], *options, ranks=ranks)
        return results[key]

    return train
