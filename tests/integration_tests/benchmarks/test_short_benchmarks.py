"""Test short runs of repeated_training, step_time and soak on the CPU backend."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

pytestmark = pytest.mark.long


def run(script, output, arguments):
    """Run a benchmark; return the finished process and the results."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *shlex.split(arguments), "--output", str(output)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert output.exists(), done.stdout + done.stderr
    return done, json.loads(output.read_text())


def test_repeated_runs_are_compared_across_launches(tmp_path):
    arguments = "--configurations B --variants eager native 'eager::--lr 1e-3' --launches 2 --runs 1 --steps 5"
    done, found = run("repeated_training.py", tmp_path / "results.json", arguments)
    assert done.returncode == 1, done.stderr
    rows = found["results"]["B"]
    assert [(row["equal"], row["results"]) for row in rows.values()] == [(2, 1), (2, 1), (0, 1)]
    assert rows["eager::--lr 1e-3"]["differences"][0].startswith("step 2: ")


def test_models_of_several_sizes_train_in_one_launch(tmp_path):
    sizes = "B:--num-layers 1", "B:--num-layers 1 --global-batch-size 4"
    arguments = f"--train {sizes[0]!r} eager native --train {sizes[1]!r} native --steps 20 --logs {tmp_path / 'logs'}"
    done, found = run("step_time.py", tmp_path / "sizes.json", arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = found["configurations"]
    assert [[row["variant"] for row in rows[size]] for size in sizes] == [["eager", "native"], ["native"]]
    assert [rows[size][-1]["equal_steps"] for size in sizes] == [20, None]
    assert len(list((tmp_path / "logs").glob("*.log"))) == 1
    assert found["note"] in done.stdout


def test_short_soak_is_bit_identical_after_a_restart(tmp_path):
    arguments = "--configurations grouped --ranks 1 --at-once 2 --steps 10 --evaluate-every 4 --save-every 5"
    done, found = run("soak.py", tmp_path / "soak.json", f"{arguments} --hidden 32 --sequence 16")
    assert done.returncode == 0, done.stdout + done.stderr
    grouped = found["grouped"]
    assert grouped["differing_steps"] == grouped["without_graphs"] == []
    assert grouped["sha256_graphed"] == grouped["sha256_eager"]
    lengths = {run: len(mib) for run, mib in grouped["reserved_mib"].items()}
    assert lengths == {"eager": 10, "graphed": 5, "resumed": 5}
