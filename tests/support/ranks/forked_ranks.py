"""Run scripts on CPU ranks forked from a process that has already imported their modules.

Imports take longer than a short run. Each process that starts ranks has its own preloaded process.
"""

import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

from torch.multiprocessing import start_processes

PRELOADED = "tests.support.ranks.preloaded"
OWN = {"TORCHDYNAMO_DISABLE": "1", "PYTHONFAULTHANDLER": "1"}
GRACE = 120  # time for ranks on a busy machine to write a checkpoint, in seconds


class ForkedRanks:
    """Runs a script on CPU-backend ranks in the background. If one rank fails, the others are terminated.

    Args:
        arguments: The script and its arguments.
        log: File for the output of all ranks.
        ranks: Number of processes.
        environment: Additional environment variables.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        ranks: int = 2,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._log = log
        log.touch()
        context = get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        variables = os.environ | OWN | (environment or {})
        self._launcher = context.Process(target=_launch, args=(list(arguments), variables, log, ranks))
        # The server starts with the first process and inherits this environment for its imports.
        with mock.patch.dict(os.environ, OWN):
            self._launcher.start()

    def running(self) -> bool:
        """Return whether the ranks are running."""
        return self._launcher.is_alive()

    def terminate(self) -> None:
        """Send SIGTERM to the ranks, and SIGKILL ``GRACE`` seconds later."""
        self._launcher.terminate()

    def ended(self, timeout: float) -> int:
        """Wait for the ranks and return the exit status, 0 if all ranks succeeded.

        Raises:
            AssertionError: ``timeout`` seconds passed, and the ranks were terminated. The message includes the end of
                the log.
        """
        self._launcher.join(timeout)
        if self.running():
            self.terminate()
            self._launcher.join()
            raise AssertionError(f"still running after {timeout} s:\n{self.log_tail()}")
        assert self._launcher.exitcode is not None
        return self._launcher.exitcode

    def log_tail(self) -> str:
        """Return the end of the log."""
        return self._log.read_text(errors="replace")[-12000:]


def _launch(arguments: list[str], environment: dict[str, str], log: Path, ranks: int) -> None:
    """Start the ranks, forward SIGTERM (and SIGKILL after ``GRACE``), and wait for them.

    Raises:
        ProcessExitedException: A rank failed.
    """
    with log.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    os.environ.clear()
    os.environ |= environment | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    started = start_processes(_rank, (arguments,), nprocs=ranks, join=False, start_method="fork")

    def end(number: int, frame: object) -> None:
        for process in started.processes:
            process.terminate() if number == signal.SIGTERM else process.kill()
        signal.alarm(GRACE)

    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, end)
    while not started.join():
        pass


def _rank(rank: int, arguments: list[str]) -> None:
    """Run the script as one rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = ["", *arguments]
    runpy.run_module("megatron_fsdp_cuda_graphs.cpu_backend", run_name="__main__", alter_sys=True)
