"""Test that context-parallel training with graphs is bit-identical to eager, on two CPU ranks.

A stand-in replaces TransformerEngine's attention, the only one that supports context parallelism.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import (
    assert_as_eager,
    assert_differs_from,
    assert_went_on_eagerly,
    captures_model,
    replays_of_evaluations,
)

SIZES: dict[str, Any] = {"layers": 2, "steps": 6}
# Each case, with its forward replays per micro-batch
CASES: list[tuple[dict[str, Any], int]] = [
    ({"holds": "layer", "dropout": 0.1, "positions": "mrope"}, 2),
    ({"modules": ["attn"], "dtype": "bf16"}, 2),
    ({"holds": "model", "dtype": "bf16", "dropout": 0.1, "microbatches": 2, "evaluates": True}, 1),
    ({"holds": "model", "positions": "yarn", "sequences_later": [16, 32]}, 1),
    ({"holds": "model", "positions": "mrope", "dtype": "bf16", "microbatches": 2, "evaluates": True}, 1),
    ({"holds": None, "positions": "mrope", "mtp": 1, "sequences_later": [16, 32]}, 1),
    ({"holds": "model", "control": "captured_again"}, 1),
]


@pytest.mark.parametrize(("case", "pieces"), mostly_long(CASES, CASES[2]))
def test_graphs_are_bit_identical_to_eager(trained, case, pieces):
    result = trained(SIZES | case, "--cp", "2")
    assert_as_eager(result)
    layers = SIZES["layers"] + case.get("mtp", 0)
    assert result["graphs"] == (0 if captures_model(case) else layers)
    assert result["replays"] == 2 * pieces * case.get("microbatches", 1)
    assert result["evaluation_replays"] == replays_of_evaluations(SIZES | case, layers)


@pytest.mark.long
@pytest.mark.parametrize("positions", ["rope", "mrope"])
def test_chunks_of_pipeline_stages_are_bit_identical_to_eager(trained, positions):
    case = SIZES | {"layers": 4, "holds": "model", "tied": False, "microbatches": 4, "evaluates": True}
    result = trained(case | {"positions": positions}, "--pp", "2", "--cp", "2", ranks=4)
    assert_as_eager(result)
    assert (result["graphs"], result["replays"]) == (0, 2 * 4)


@pytest.mark.long
def test_training_continues_eagerly_after_a_failed_capture(trained):
    assert_went_on_eagerly(trained(SIZES | {"holds": "model", "control": "failed_backward_capture"}, "--cp", "2"))


@pytest.mark.long
def test_dead_replay_changes_the_loss(trained):
    assert_differs_from(trained(SIZES | {"holds": "model", "control": "dead_replay"}, "--cp", "2"), 3)
