"""Test that graphs of a GPT and its vision encoder under Megatron-FSDP are bit-identical to eager, on two CPU ranks.

``VisionTECudaGraphHelper`` captures first, then ``TECudaGraphHelper``. test_fsdp_graphs.py trains a vision encoder
alone.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import assert_as_eager, assert_differs_from

SIZES: dict[str, Any] = {"model": "captions", "layers": 2, "steps": 7, "micro_batch": 1}
# Each case, with its forward replays per micro-batch
CASES: list[tuple[dict[str, Any], int]] = [
    ({"dropout": 0.1, "microbatches": 2, "evaluates": True}, 4),
    ({"dtype": "bf16", "holds": "layer", "control": "captured_again_later"}, 4),
    ({"modules": ["attn"], "dropout": 0.1}, 4),
    ({"data_parallel_sharding_strategy": "optim_grads"}, 4),
]


@pytest.mark.parametrize(("case", "pieces"), mostly_long(CASES, CASES[1]))
def test_graphs_are_bit_identical_to_eager(trained, case, pieces):
    result = trained(SIZES | case)
    assert_as_eager(result)
    assert result["graphs"] == 2 * SIZES["layers"]
    assert result["replays"] == 2 * pieces * case.get("microbatches", 1)


@pytest.mark.long
def test_failed_language_capture_keeps_graphs_of_the_encoder(trained):
    result = trained(SIZES | {"control": "failed_language_capture", "microbatches": 2})
    assert_as_eager(result)
    assert result["graphs"] == SIZES["layers"]
    assert result["replays"] == 2 * 2 * SIZES["layers"]  # directions, micro-batches


@pytest.mark.long
def test_dead_replay_changes_the_loss(trained):
    assert_differs_from(trained(SIZES | {"control": "dead_replay"}), 3)
