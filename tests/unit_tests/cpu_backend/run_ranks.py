"""Runs a script of this folder on gloo ranks, on the CPU backend."""

import tempfile
from pathlib import Path
from subprocess import CompletedProcess

from tests.support.forked_ranks import ForkedRanks

HERE = Path(__file__).resolve().parent
TIMEOUT = 600  # seconds


def on_two_ranks(script: str, *arguments: str) -> CompletedProcess:
    """Run ``script``; what both ranks write comes back together, as the output and as the errors."""
    return on_ranks(2, script, *arguments)


def on_ranks(count: int, script: str, *arguments: str) -> CompletedProcess:
    """Run ``script`` on ``count`` ranks; see ``on_two_ranks``."""
    command = [str(HERE / script), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        ranks = ForkedRanks(command, log, count, {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"})
        status = ranks.ended(TIMEOUT)
        written = log.read_text(errors="replace")
    return CompletedProcess(command, status, written, written)
