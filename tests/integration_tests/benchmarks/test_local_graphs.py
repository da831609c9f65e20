"""local_graphs compares identical trainings on the CPU backend."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "local_graphs.py"
SMALL = ["--rounds", "1", "--steps", "3", "--layers", "2", "--hidden", "64", "--sequence", "16"]


@pytest.mark.long
def test_figures_and_ratios_are_written(tmp_path):
    output = tmp_path / "figures.json"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run([sys.executable, str(SCRIPT), "--output", str(output), *SMALL], env=environment, check=True)
    written = json.loads(output.read_text())
    (first,) = written["rounds"]
    assert first["this patch"]["losses"] == first["eager"]["losses"]
    assert len(first["megatron-core"]["losses"]) == 4
    assert first["this patch"]["capture_s"] > first["eager"]["capture_s"] == 0
    assert written["ratios"]["step_ms"] == first["this patch"]["step_ms"] / first["megatron-core"]["step_ms"]
