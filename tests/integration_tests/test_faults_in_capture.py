"""Test that failed captures leave no state behind: no rank hangs, and training continues bit-identically.

Faults are injected into a sample of operators and calls. Run ``tests/support/trainings/inject_faults.py`` without
``--stride`` to cover all of them.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import assert_as_eager
from tests.support.trainings.launch import inject_faults

PLACES = {
    "default": "--stride 503 --holds model",
    "layers": "--stride 401 --holds layer",
    "TP2": "--tp 2 --stride 301 --holds layer model",
    "HSDP": '--case {"num_distributed_optimizer_instances":2,"outer_dp_sharding_strategy":"optim"} --stride 301'
    " --holds model",
    "EP2": '--ep 2 --case {"experts":4,"moe_expert_capacity_factor":1.0} --holds layer --stride 301',
}
INTERRUPTED: list[dict[str, Any]] = [
    {"control": "interrupted_on_one_rank", "holds": layers, "dropout": 0.1, "steps": 6} for layers in ("model", "layer")
]


@pytest.mark.parametrize("place", mostly_long(PLACES, "default"))
def test_fault_raises_on_every_rank_and_leaves_no_state(tmp_path, place):
    options = PLACES[place].split()
    for result in inject_faults(*options, ranks=2, folder=tmp_path, environment={"CUDA_VISIBLE_DEVICES": ""}):
        assert result["problems"] == []
        assert sum(result["attempts"].values()) >= 15
        assert result["passed"] == result["attempts"]
        assert result["replays_at_the_end"] > 0


@pytest.mark.parametrize("case", mostly_long(INTERRUPTED, INTERRUPTED[0]))
def test_interrupt_on_one_rank_ends_the_capture_on_all(trained, case):
    result = trained(case)
    assert_as_eager(result)
    assert result["replays"] > 0


@pytest.mark.long
def test_failed_warm_up_for_evaluation_leaves_no_rank_waiting(trained):
    case = {"control": "failed_warm_up_for_evaluation", "evaluates": True, "holds": "model", "steps": 6}
    result = trained(case, "--tp", "2")
    assert_as_eager(result)
    assert result["evaluation_replays"] == [0]
    assert result["replays"] > 0
