"""A GPT that reads images under Megatron-FSDP, with graphs of its vision encoder and its own layers, on two CPU ranks.

``VisionTECudaGraphHelper`` captures first, then ``TECudaGraphHelper``. A model with a vision encoder alone is in
``test_fsdp_graphs.py``.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import Trained, assert_as_eager, assert_differs_from
from tests.support.trainings.launch import name_of

SIZES: dict[str, Any] = {"captions": True, "layers": 2, "steps": 7, "micro_batch": 1}
# With each case the pieces of layers that are replayed together in a micro-batch.
EQUAL: list[tuple[dict[str, Any], int]] = [
    ({"dropout": 0.1, "microbatches": 2, "evaluates": True}, 2),
    ({"dtype": "bf16", "holds": "layer", "control": "captured_again_later"}, 4),
    ({"modules": ["attn"], "dropout": 0.1}, 4),
    ({"holds": "model"}, 2),  # its layers are captured
    ({"strategy": "optim_grads", "optimizer_graph": True}, 4),
]
FAILED: dict[str, Any] = {"control": "failed_language_capture", "microbatches": 2}
DEAD: dict[str, Any] = {"control": "dead_replay"}


@pytest.fixture(scope="module")
def results(compare_runs):
    """The result of each case, by its name."""
    return Trained([*(case for case, _ in EQUAL), FAILED, DEAD], compare_runs, SIZES)


@pytest.mark.parametrize(("case", "pieces"), mostly_long(EQUAL, EQUAL[1]), ids=[name_of(case) for case, _ in EQUAL])
def test_both_train_bit_for_bit_as_eager(results, case, pieces):
    result = results[name_of(case)]
    assert_as_eager(result)
    assert len(result["losses"]) == SIZES["steps"]
    assert result["graphs"] == 2 * SIZES["layers"]
    assert result["replays"] == 2 * pieces * case.get("microbatches", 1)


def test_where_the_language_model_cannot_be_captured_the_vision_encoder_goes_on_with_graphs(results):
    result = results[name_of(FAILED)]
    assert_as_eager(result)
    assert result["graphs"] == SIZES["layers"]
    assert result["replays"] == 2 * 2  # one piece, in two micro-batches


def test_a_replay_that_does_nothing_changes_the_loss(results):
    assert_differs_from(results[name_of(DEAD)], 3)
