"""Test repeated_training on the CPU backend: equal runs, and a run with a different learning rate."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "repeated_training.py"


@pytest.mark.long
def test_runs_are_compared_across_launches(tmp_path):
    out = tmp_path / "results.json"
    options = ["--configurations", "B", "--variants", "eager", "native", "eager::--lr 1e-3"]
    command = [sys.executable, str(SCRIPT), *options, "--launches", "2", "--runs", "1", "--steps", "5"]
    done = subprocess.run([*command, "--output", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    rows = json.loads(out.read_text())["results"]["B"]
    assert [(row["equal"], row["results"]) for row in rows.values()] == [(2, 1), (2, 1), (0, 1)]
    assert rows["eager::--lr 1e-3"]["differences"][0].startswith("step 2: ")
