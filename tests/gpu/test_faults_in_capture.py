"""Test faults in captures and killed ranks on GPUs."""

import json

import pytest

from tests.support.trainings.gpus import DETERMINISTIC, GPUS
from tests.support.trainings.kill_a_rank import LAUNCHED, killed
from tests.support.trainings.launch import inject_faults

if GPUS < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

TIMEOUT = 30  # seconds, for the process groups
# Attention and router with sequence parallelism
SEQUENCE_PARALLEL = json.dumps(
    {
        "transformer_engine": True,
        "sequence_parallel": True,
        "experts": 4,
        "modules": ["attn", "moe_router"],
        "dtype": "bf16",
        "hidden": 64,
        "num_attention_heads": 4,
        "sequence": 128,  # with 32, TransformerEngine selects a different attention kernel under capture
    }
)


OPTIONS: list[tuple[str, ...]] = [("--holds", holds) for holds in ("layer", "model")]
OPTIONS += [(*one, "--tp", "2") for one in OPTIONS]
OPTIONS.append(("--holds", "layer", "--tp", "2", "--case", SEQUENCE_PARALLEL))


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_fault_raises_on_every_rank_and_leaves_no_state(tmp_path, options):
    (result,) = inject_faults("--stride", "151", *options, ranks=2, folder=tmp_path, environment=DETERMINISTIC)
    assert not result["problems"], str(result["problems"])[:4000]
    assert sum(result["attempts"].values()) >= 40
    assert result["passed"] == result["attempts"]
    assert result["replays_at_the_end"] > 0


@pytest.mark.parametrize("holds", ["model", "layer"])
def test_watchdog_ends_the_survivor_of_a_killed_rank(holds):
    status, seconds, output = killed(TIMEOUT, holds)
    assert LAUNCHED in output
    assert status not in (0, -9)
    assert seconds < 4 * TIMEOUT
    assert "NCCL" in output, output[-3000:]
