"""A model under torch's FSDP2 with a graph per layer trains bit for bit as it does eagerly, on two CPU ranks.

Loss and gradient norm of every step and every parameter shard that the optimizer owns are compared, over 7 steps with
capture after 3.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import Trained, assert_as_eager, assert_differs_from, assert_went_on_eagerly
from tests.support.trainings.evaluations import replays_of_evaluations
from tests.support.trainings.launch import name_of

TORCH: dict[str, Any] = {"torch_fsdp": True, "tied": False, "layers": 3, "hidden": 32, "sequence": 16, "steps": 7}
EQUAL: list[dict[str, Any]] = [
    {"dtype": "bf16", "dropout": 0.1, "microbatches": 2},
    {"dtype": "bf16", "reshard": False, "microbatches": 2, "recompute": ["core_attn", "mlp"]},
    {"warmup": 0, "mtp": 1},
    {"modules": ["attn"], "evaluates": True, "dropout": 0.1},
    {"evaluates_often": True, "dtype": "bf16", "dropout": 0.1, "microbatches": 2},
    {"evaluates_often": True, "reshard": False, "warmup": 0, "mtp": 1, "evaluated_sequence": 8},
    {"evaluates_often": True, "experts": 4, "modules": ["attn", "moe_router", "moe_preprocess"]},
    {"experts": 4, "modules": ["attn", "moe_router", "moe_preprocess"], "dtype": "bf16", "microbatches": 2},
    {"experts": 4, "capacity": 1.0},
    {"pattern": "M*-"},
    {"control": "captured_again_later", "dropout": 0.1},
]
SURVIVED: list[dict[str, Any]] = [
    {"control": "failed_backward_capture"},
    {"control": "fallback_after_a_failure_on_one_rank", "dropout": 0.1},
]
DEAD: dict[str, Any] = {"control": "dead_replay"}


@pytest.fixture(scope="module")
def results(compare_runs):
    """The result of each case, by its name."""
    return Trained([*EQUAL, *SURVIVED, DEAD], compare_runs, TORCH)


@pytest.mark.parametrize("case", mostly_long(EQUAL, EQUAL[4], EQUAL[-1]), ids=name_of)
def test_graphs_train_bit_for_bit_as_eager(results, case):
    result = results[name_of(case)]
    assert_as_eager(result)
    layers = TORCH["layers"] + case.get("mtp", 0)
    assert result["graphs"] == layers
    assert result["replays"] == 2 * layers * case.get("microbatches", 1)
    assert result["evaluation_replays"] == replays_of_evaluations(TORCH | case, 0)
    assert len(result["losses"]) == TORCH["steps"]


@pytest.mark.parametrize("case", SURVIVED, ids=name_of)
def test_training_goes_on_eagerly_after_a_failed_capture(results, case):
    result = results[name_of(case)]
    assert_went_on_eagerly(result)


def test_a_replay_that_does_nothing_changes_the_loss(results):
    assert_differs_from(results[name_of(DEAD)], 3)


def test_parameters_that_are_not_kept_in_place_are_noticed(compare_runs):
    # On one rank only, perhaps: the first error ends all ranks.
    (result,) = compare_runs([TORCH | {"control": "parameters_not_kept"}], "--stop-at-error")
    assert "ChangedSinceCaptureError" in result["error"] or "StaleAddress" in result["error"]
