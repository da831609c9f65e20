"""Test that torch's FSDP2 with a graph per layer trains bit-identically to eager, on two CPU ranks.

Compare the loss and gradient norm of every step, and the optimizer's shards after the last step.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import (
    assert_as_eager,
    assert_differs_from,
    assert_went_on_eagerly,
    replays_of_evaluations,
)

FSDP2: dict[str, Any] = {"wrapper": "fsdp2", "tied": False, "layers": 3, "hidden": 32, "sequence": 16, "steps": 7}
PARTS: dict[str, Any] = {"experts": 4, "modules": ["attn", "moe_router", "moe_preprocess"]}
EQUAL: list[dict[str, Any]] = [
    {"evaluates": "often", "dtype": "bf16", "dropout": 0.1, "microbatches": 2},
    {"dtype": "bf16", "reshard_after_forward": False, "microbatches": 2, "recompute_modules": ["core_attn", "mlp"]},
    {"modules": ["attn"], "evaluates": True, "dropout": 0.1},
    {"evaluates": "often", "reshard_after_forward": False, "warmup": 0, "mtp": 1, "evaluated_sequence": 8},
    {"evaluates": "often", **PARTS, "dtype": "bf16", "microbatches": 2},
    {"experts": 4, "moe_expert_capacity_factor": 1.0},
    {"pattern": "M*-"},
    {"control": "captured_again_later", "dropout": 0.1},
]
SURVIVED: list[dict[str, Any]] = [
    {"control": "failed_backward_capture"},
    {"control": "fallback_after_a_failure_on_one_rank", "dropout": 0.1},
]


@pytest.mark.parametrize("case", mostly_long(EQUAL, EQUAL[0]))
def test_graphs_are_bit_identical_to_eager(trained, case):
    result = trained(FSDP2 | case)
    assert_as_eager(result)
    layers = FSDP2["layers"] + case.get("mtp", 0)
    assert result["graphs"] == layers
    assert result["replays"] == 2 * layers * case.get("microbatches", 1)
    assert result["evaluation_replays"] == replays_of_evaluations(FSDP2 | case, 0)


@pytest.mark.parametrize("case", mostly_long(SURVIVED, SURVIVED[1]))
def test_training_continues_eagerly_after_a_failed_capture(trained, case):
    assert_went_on_eagerly(trained(FSDP2 | case))


@pytest.mark.long
def test_dead_replay_changes_the_loss(trained):
    assert_differs_from(trained(FSDP2 | {"control": "dead_replay"}), 3)


def test_moved_parameters_are_an_error(compare_runs):
    # Parameters may have moved on one rank only: the first error ends all ranks.
    (result,) = compare_runs([FSDP2 | {"control": "parameters_not_kept"}], "--stop-at-error")
    assert "ChangedSinceCaptureError" in result["error"] or "StaleAddress" in result["error"]
