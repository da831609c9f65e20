"""Whole chunks of a pipeline in graphs of their own for each micro-batch train bit for bit as eagerly.

Two stages, with one chunk each or with two.
"""

from typing import Any

import pytest

from tests.support.sample import name_of
from tests.support.trainings.compared import assert_as_eager, assert_differs_from
from tests.support.trainings.gpus import DETERMINISTIC, GPUS, SIZES
from tests.support.trainings.models import FULL_RECOMPUTE

COMMON: dict[str, Any] = {"layers": 2, "microbatches": 4, "tied": False, "holds": "model"}
STAGES: list[dict[str, Any]] = [
    COMMON | {"layers": 8, "dtype": "bf16"} | case
    for case in (
        {"dropout": 0.1, "evaluates": True},
        {"virtual": 2, "dropout": 0.1},
        {"virtual": 2, "experts": 8, "moe_use_grouped_tensor": True},
        FULL_RECOMPUTE | {"recompute_num_layers": 2, "microbatches": 8},
        {"tied": True, "mtp": 1, "virtual": 2, "evaluates": "often"},
        {"holds": "layer", "virtual": 2, "evaluates": True},
    )
]


def compared(compare_runs, cases, *options, ranks):
    environment = DETERMINISTIC
    found = compare_runs([SIZES | case for case in cases], *options, ranks=ranks, environment=environment)
    return {name_of(case): result for case, result in zip(cases, found, strict=True)}


@pytest.fixture(scope="session")
def stages(compare_runs):
    return compared(compare_runs, STAGES, "--pp", "2", ranks=GPUS // 2 * 2)


def assert_replayed(case, result, chunks):
    assert_as_eager(result)
    replays = 2 * chunks * case["microbatches"]
    if case["holds"] == "layer":
        replays *= case["layers"]
    assert result["replays"] == replays


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", STAGES, ids=name_of)
def test_two_stages(stages, case):
    assert_replayed(case, stages[name_of(case)], case.get("virtual", 1))


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_a_replay_that_does_nothing_changes_the_loss(compare_runs):
    case = COMMON | {"layers": 4, "dtype": "bf16", "control": "dead_replay"}
    (result,) = compared(compare_runs, [case], "--pp", "2", ranks=GPUS // 2 * 2).values()
    assert_differs_from(result, 3)
