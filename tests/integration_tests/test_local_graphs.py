"""Test that megatron-core's local graphs train bit-identically to eager with this patch, on two CPU ranks."""

from typing import Any

import pytest

from tests.support.trainings.compared import assert_as_eager, assert_differs_from

LOCAL: dict[str, Any] = {"local": True, "wrapper": "ddp", "layers": 3, "steps": 7, "warmup": 1}
LOCAL |= {"hidden": 32, "sequence": 16}


@pytest.fixture
def train(trained):
    """Return a function that trains a case."""
    return lambda case: trained(LOCAL | case)


def test_graphs_are_bit_identical_to_eager(train):
    result = train({"microbatches": 2, "microbatches_later": 3, "evaluates": True})
    assert_as_eager(result)
    assert result["graphs"] == LOCAL["layers"]


def test_dead_replay_changes_the_loss_of_the_second_step(train):
    assert_differs_from(train({"control": "dead_local_replay"}), 1)
