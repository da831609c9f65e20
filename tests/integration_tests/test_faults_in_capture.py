"""Captures that fail, on one rank or on both, leave nothing behind: no rank waits, and training goes on bit for bit.

A sample of the places where they can fail. For all of them run ``tests/support/inject_faults.py`` with no ``--stride``;
its results are in ``benchmarks/results/faults_in_capture.json``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import OWN

SCRIPT = Path(__file__).parents[1] / "support" / "inject_faults.py"


def injected(tmp_path, *options):
    """The results of the script on two ranks."""
    output = tmp_path / "results.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(SCRIPT), "--output", str(output), *options],
        env=os.environ | OWN | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize(
    "options",
    [
        ("--stride", "601"),
        ("--matching", "c10d", "--kinds", "exception", "--layers-per-graph", "1"),
    ],
    ids=["anywhere", "collectives"],
)
def test_a_fault_is_an_error_on_every_rank_and_leaves_nothing_behind(tmp_path, options):
    for result in injected(tmp_path, *options):
        assert result["problems"] == []
        assert sum(result["attempts"].values()) >= 15
        assert result["passed"] == result["attempts"]
        assert result["replays_at_the_end"] > 0
