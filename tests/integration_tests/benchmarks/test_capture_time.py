"""capture_time: the benchmark runs; what it measures on a CPU means nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "capture_time.py"


@pytest.mark.long
def test_every_engine_that_is_there_captures_layers_of_each_count(tmp_path):
    out = tmp_path / "results.json"
    sizes = ["--layers", "1", "3", "--hidden", "64", "--sequence", "8", "--rounds", "2", "--warmup", "1"]
    command = [sys.executable, "-m", "megatron_fsdp_cuda_graphs.cpu_backend", str(SCRIPT), *sizes, "--output", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    captured = {(row["round"], row["layers"], row["engine"]) for row in result["captures"]}
    assert captured == {(number, count, "native") for number in (0, 1) for count in (1, 3)}
    assert all(row["seconds"] > 0 for row in result["captures"])
    assert {"python", "torch"} <= result["versions"].keys()
    assert result["hardware"]
    assert "reserved MiB" in done.stdout


@pytest.mark.long
def test_a_capture_of_a_model_is_told_by_what_the_host_does(tmp_path):
    out = tmp_path / "results.json"
    options = ["--models", "B", "--variants", "native", "eager", "--examine", "capture", "functions"]
    command = [sys.executable, str(SCRIPT), *options, "--output", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["examined"]
    assert [(row["variant"], row["examined"]) for row in found] == [("native", "capture"), ("native", "functions")]
    capture, functions = (row["found"] for row in found)
    phases = capture["phases"]
    assert {"forward recorded", "backward recorded", "graphs instantiated"} <= phases.keys()
    assert sum(row["ms"] for row in phases.values()) == pytest.approx(1000 * capture["seconds"], rel=0.1)
    assert "cumulative time" in functions["functions"]
    assert "forward recorded" in done.stdout
