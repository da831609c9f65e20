"""Sequences that are divided among context-parallel ranks: with graphs bit for bit as eagerly, on two CPU ranks.

Attention stands for TransformerEngine's, which alone takes such sequences. Capture is after 3 steps.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import Trained, assert_as_eager, assert_differs_from, assert_went_on_eagerly
from tests.support.trainings.evaluations import replays_of_evaluations
from tests.support.trainings.launch import name_of

SIZES: dict[str, Any] = {"layers": 2, "steps": 6}
# With each case how many forward graphs are replayed in a micro-batch.
CASES: list[tuple[dict[str, Any], int]] = [
    ({}, 1),
    ({"holds": "layer", "dropout": 0.1}, 2),
    ({"modules": ["attn"], "dtype": "bf16"}, 2),
    ({"holds": "model", "dtype": "bf16", "dropout": 0.1, "microbatches": 2, "evaluates": True}, 1),
    ({"holds": None, "mtp": 1, "microbatches": 2}, 1),
    ({"holds": "model", "positions": "yarn", "sequences_later": [16, 32]}, 1),
    ({"holds": "model", "positions": "mrope", "dtype": "bf16", "microbatches": 2, "evaluates": True}, 1),
    ({"holds": "layer", "positions": "mrope"}, 2),
    ({"holds": None, "positions": "mrope", "mtp": 1, "sequences_later": [16, 32]}, 1),
    ({"holds": "model", "control": "captured_again"}, 1),
]
FAILED: dict[str, Any] = {"holds": "model", "control": "failed_backward_capture"}
DEAD: dict[str, Any] = {"holds": "model", "control": "dead_replay"}


@pytest.fixture(scope="module")
def results(compare_runs):
    """The result of each case on two context-parallel ranks, by its name."""
    return Trained([*(case for case, _ in CASES), FAILED, DEAD], compare_runs, SIZES, "--cp", "2")


@pytest.mark.parametrize(
    ("case", "pieces"), mostly_long(CASES, CASES[3]), ids=[name_of(case) or "all layers" for case, _ in CASES]
)
def test_parts_of_sequences_train_bit_for_bit_as_eager(results, case, pieces):
    result = results[name_of(case)]
    assert_as_eager(result)
    layers = SIZES["layers"] + case.get("mtp", 0)
    assert result["graphs"] == (0 if case.get("holds", "decoder") in (None, "model") else layers)
    assert result["replays"] == 2 * pieces * case.get("microbatches", 1)
    assert result["evaluation_replays"] == replays_of_evaluations(SIZES | case, layers)


@pytest.mark.long
@pytest.mark.parametrize("positions", ["rope", "mrope"])
def test_pipeline_stages_of_parts_of_sequences_are_captured_as_whole_chunks(compare_runs, positions):
    case = SIZES | {"layers": 4, "holds": "model", "tied": False, "microbatches": 4, "evaluates": True}
    case["positions"] = positions
    (result,) = compare_runs([case], "--pp", "2", "--cp", "2", ranks=4)
    assert_as_eager(result)
    assert (result["graphs"], result["replays"]) == (0, 2 * 4)


@pytest.mark.long
def test_training_goes_on_eagerly_after_a_failed_capture(results):
    assert_went_on_eagerly(results[name_of(FAILED)])


@pytest.mark.long
def test_a_replay_that_does_nothing_changes_the_loss(results):
    assert_differs_from(results[name_of(DEAD)], 3)
