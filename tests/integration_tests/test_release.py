"""Test that training with ``release`` and ``restore`` between steps is bit-identical to eager, on two ranks."""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import assert_as_eager

RELEASED = 5
CASE: dict[str, Any] = {"layers": 3, "hidden": 32, "sequence": 16, "dropout": 0.1, "released": RELEASED, "steps": 8}
CASES: list[dict[str, Any]] = [
    {"holds": None, "dtype": "bf16", "evaluates": "often"},
    {"holds": None, "dtype": "bf16", "microbatches": 2, "reloads": True},
    {"dtype": "bf16", "mtp": 1},
    {"holds": "layer", "dtype": "fp16", "reloads": True},
    {"holds": "layer", "experts": 4, "moe_use_grouped_tensor": True},
    {"modules": ["attn"], "evaluates": True},
    {"wrapper": "ddp", "dtype": "bf16", "microbatches": 2},
]
PIPELINE: list[dict[str, Any]] = [
    {"layers": 4, "microbatches": 4, "tied": False, "holds": holds, "virtual": 2} for holds in (None, "layer")
]


def assert_all_steps_but_one_replay(result):
    assert_as_eager(result)
    replayed = [step for step, replays in enumerate(result["step_replays"]) if replays]
    assert replayed == [3, 4, 6, 7]


@pytest.mark.parametrize("case", mostly_long(CASES, CASES[0], CASES[3]))
def test_training_around_release_is_bit_identical(trained, case):
    assert_all_steps_but_one_replay(trained(CASE | case))


@pytest.mark.parametrize("case", mostly_long(PIPELINE, PIPELINE[0]))
def test_pipelines_around_release_are_bit_identical(trained, case):
    assert_all_steps_but_one_replay(trained(CASE | case, "--pp", "2"))


def test_hybrid_sharding_around_release_is_bit_identical(trained):
    hybrid = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim", "dtype": "bf16"}
    assert_all_steps_but_one_replay(trained(CASE | hybrid | {"holds": None}, "--instances", "2"))


@pytest.mark.long
def test_graphs_without_a_helper_are_captured_again(trained):
    result = trained(CASE | {"full_iteration": True, "wrapper": "ddp", "dtype": "bf16", "warmup": 1})
    assert_as_eager(result)
    assert result["step_replays"] == [0, 1, 1, 1, 1, 0, 0, 1]
