"""Test that scaling trains models of several sizes on two CPU ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "scaling.py"


@pytest.mark.long
def test_models_train_in_one_launch_and_match_eager(tmp_path):
    chosen = ["--layers", "1", "--micro-batches", "1", "2", "--steps", "20", "--no-profile"]
    output = tmp_path / "growth.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *chosen, "--output", str(output), "--logs", str(tmp_path / "logs")],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    trained = [(each["variant"], each["layers"], each["micro_batches"]) for each in found["models"]]
    assert trained == [("eager", 1, 1), ("native", 1, 1), ("eager", 1, 2), ("native", 1, 2)]
    assert [each["equal_steps"] for each in found["models"] if each["variant"] == "native"] == [20, 20]
    assert len(list((tmp_path / "logs").glob("*.log"))) == 1
    assert found["note"] in done.stdout
