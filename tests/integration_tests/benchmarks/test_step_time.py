"""Test that step_time trains on CPU ranks, compares losses and counts calls."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "step_time.py"
STEPS = 20
OTHER_SEED = "native::--seed 1"

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the finished benchmark of three variants (eager, native, native with another seed) and its folder."""
    folder = tmp_path_factory.mktemp("step_time")
    return train(folder, "eager", "native", OTHER_SEED, more=("--profile",)), folder


def train(folder, *variants, more=()):
    """Run the benchmark for ``variants`` of configuration B, with arguments ``more``; return the finished process."""
    chosen = ["--train", "B", *variants, "--steps", str(STEPS), *more]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *chosen, "--output", str(folder / "it.json"), "--logs", str(folder / "logs")],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (folder / "it.json").exists(), done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def rows(trained):
    done, folder = trained
    found = {row["variant"]: row for row in json.loads((folder / "it.json").read_text())["configurations"]["B"]}
    assert not any("error" in row or "profile_error" in row for row in found.values()), done.stdout
    return found


def test_graphs_are_reported_bit_identical_to_eager(rows):
    assert (rows["native"]["reference"], rows["native"]["equal_steps"], rows["native"]["steps"]) == (
        "eager",
        STEPS,
        STEPS,
    )
    assert rows["native"]["graphs"] > 0 == rows["eager"]["graphs"]


def test_another_seed_fails(trained, rows):
    done, _ = trained
    assert rows[OTHER_SEED]["equal_steps"] == 0
    assert done.returncode == 1
    differ = [line for line in done.stdout.splitlines() if "differs from eager in step 1" in line]
    assert [line.startswith(OTHER_SEED) for line in differ] == [True]


def test_profiled_runs_match_timed_runs(rows):
    assert [row["repeatable"] for row in rows.values()] == [True] * 3


def test_python_calls_do_not_depend_on_earlier_runs(rows):
    native, other = (rows[name]["profile"]["python_calls"] for name in ("native", OTHER_SEED))
    assert native == other
    assert 0 < native < rows["eager"]["profile"]["python_calls"]


def test_compute_alone_matches_eager_on_one_rank(tmp_path):
    done = train(tmp_path, "eager", "compute_alone", more=("--gpus", "1"))
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "it.json").read_text())["numbers"]["B"]
    assert found["compute_alone"] == found["eager"]
