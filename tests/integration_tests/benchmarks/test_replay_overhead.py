"""replay_overhead runs on the CPU backend."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "replay_overhead.py"


@pytest.mark.long
def test_every_engine_is_measured(tmp_path):
    output = tmp_path / "results.json"
    sizes = ["--callables", "1", "3", "--repeats", "2", "--rounds", "2", "--memory-hidden", "8"]
    command = [sys.executable, "-m", "megatron_fsdp_cuda_graphs.cpu_backend", str(SCRIPT), *sizes]
    done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    timed = {(row["round"], row["callables"], row["engine"]) for row in result["host_time"]}
    assert timed == {
        (r, count, engine) for r in (0, 1) for count in (1, 3) for engine in ("torch", "native", "autograd alone")
    }
    assert all(row["forward_us"] > 0 and row["backward_us"] > 0 for row in result["host_time"])
    assert [weight["engine"] for weight in result["memory"]] == ["torch", "native"]
    assert "ratio to torch" in done.stdout
