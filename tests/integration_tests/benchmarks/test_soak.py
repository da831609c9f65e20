"""Test a short soak with an interruption on the CPU backend."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.long
def test_short_soak_is_bit_identical_after_a_restart(tmp_path):
    output = tmp_path / "soak.json"
    command = [sys.executable, str(BENCHMARKS / "soak.py"), "--output", str(output), "--configurations", "grouped"]
    sizes = "--ranks 1 --at-once 2 --steps 10 --evaluate-every 4 --save-every 5 --hidden 32 --sequence 16"
    done = subprocess.run(
        [*command, *sizes.split()],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())["grouped"]
    assert found["differing_steps"] == found["without_graphs"] == []
    assert found["sha256_graphed"] == found["sha256_eager"]
    lengths = {run: len(mib) for run, mib in found["reserved_mib"].items()}
    assert lengths == {"eager": 10, "graphed": 5, "resumed": 5}
