"""soak: a short one on the CPU backend is bit-equal over an interruption, and a difference is found."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_a_short_soak_is_bit_equal_over_an_interruption(tmp_path):
    output = tmp_path / "soak.json"
    command = [sys.executable, str(BENCHMARKS / "soak.py"), "--output", str(output), "--configurations", "moe"]
    sizes = "--ranks 1 --at-once 2 --moe-steps 10 --evaluate-every 4 --save-every 5 --hidden 32 --sequence 16"
    done = subprocess.run(
        [*command, *sizes.split()],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())["moe"]
    assert found["differing_steps"] == found["without_graphs"] == []
    assert found["sha256_graphed"] == found["sha256_eager"]
    lengths = {run: len(mib) for run, mib in found["reserved_mib"].items()}
    assert lengths == {"eager": 10, "graphed": 5, "resumed": 5}
    assert output.with_suffix(".png").exists()


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("soak")


def lines(first, last, loss="0x1p+0", graphs=2, reserved=64.0):
    step = {"loss_hex": loss, "grad_norm_hex": "0x1p+0", "skipped": False, "graphs": graphs, "reserved_mib": reserved}
    return [step | {"step": number} for number in range(first, last + 1)]


def test_steps_that_differ_are_missing_or_had_no_graphs_are_named(soak):
    graphed = lines(1, 6) + lines(7, 8, graphs=0) + lines(9, 10, loss="0x1.1p+0")
    found = soak.compare(20, 10, {"eager": lines(1, 20), "graphed": graphed, "resumed": lines(11, 19)})
    assert found["differing_steps"] == [9, 10, 20]
    assert found["without_graphs"] == [7, 8]
    assert found["sha256_graphed"] != found["sha256_eager"]
    assert found["flat"]


def test_memory_that_is_reserved_in_the_second_half_is_not_flat(soak):
    growing = lines(11, 28) + lines(29, 30, reserved=66.0)
    found = soak.compare(30, 10, {"eager": lines(1, 30), "graphed": lines(1, 10), "resumed": growing})
    assert not found["flat"]
    assert found["grown_since_step_10_mib"] == {"eager": 0.0, "graphed": 0.0, "resumed": 2.0}
