"""Run a script on gloo ranks of the CPU backend."""

import json
import tempfile
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tests.support.ranks.forked_ranks import ForkedRanks

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT = 600  # seconds


def on_two_ranks(script: str, *arguments: str) -> CompletedProcess:
    """Run ``script``, a path relative to the repository root; stdout and stderr contain the output of both ranks."""
    command = [str(ROOT / script), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        ranks = ForkedRanks(command, log, 2, {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"})
        status = ranks.ended(TIMEOUT)
        written = log.read_text(errors="replace")
    return CompletedProcess(command, status, written, written)


def lines_of(launch: CompletedProcess) -> list[dict[str, Any]]:
    """Return the JSON objects printed by the first rank, one per line.

    Raises:
        AssertionError: There are no JSON lines. The message includes the end of the output.
    """
    lines = [json.loads(line) for line in launch.stdout.splitlines() if line.startswith("{")]
    assert lines, launch.stderr[-3000:]
    return lines
