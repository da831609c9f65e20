"""Whole chunks of a pipeline in graphs of their own for each micro-batch train bit for bit as eagerly.

Two chunks on one GPU, in the order of a stage that has both; and two stages, with one chunk each or with two.
"""

from typing import Any

import pytest

from tests.support.chunks_training import MICROBATCHES
from tests.support.compared import assert_as_eager, assert_differs_from
from tests.support.gpus import DETERMINISTIC, GPUS, SIZES
from tests.support.launch import name_of

COMMON: dict[str, Any] = {"layers": 2, "microbatches": MICROBATCHES, "tied": False, "holds": "model"}
FULL = ["recompute_granularity='full'", "recompute_method='uniform'", "recompute_num_layers=2"]
ON_ONE_GPU: list[dict[str, Any]] = [
    COMMON | {"chunks_on_one_rank": True, "dtype": "bf16"} | case
    for case in (
        {},
        {"dropout": 0.1},
        {"dtype": "fp32", "dropout": 0.1},
        {"fused_wgrad": True, "optimizer_graph": True},
        {"experts": 8, "grouped_tensor": True, "dropout": 0.1},
        {"config": FULL},
        {"control": "captured_again", "dropout": 0.1},
        {"control": "eager_micro_batch_on_one_rank", "dropout": 0.1},
        {"holds": "layer", "dropout": 0.1},
        {"mtp": 1, "dropout": 0.1, "evaluates_often": True},
    )
]
STAGES: list[dict[str, Any]] = [
    COMMON | {"layers": 8, "dtype": "bf16"} | case
    for case in (
        {"dropout": 0.1, "evaluates": True},
        {"virtual": 2, "dropout": 0.1},
        {"virtual": 2, "experts": 8, "grouped_tensor": True},
        {"config": FULL, "microbatches": 8},
        {"tied": True, "mtp": 1, "virtual": 2, "evaluates_often": True},
        {"holds": "layer", "virtual": 2, "evaluates": True},
    )
]


def compared(compare_runs, cases, *options, ranks):
    environment = DETERMINISTIC
    found = compare_runs([SIZES | case for case in cases], *options, ranks=ranks, environment=environment)
    return {name_of(case): result for case, result in zip(cases, found, strict=True)}


@pytest.fixture(scope="session")
def on_one_gpu(compare_runs):
    return compared(compare_runs, ON_ONE_GPU, ranks=1)


@pytest.fixture(scope="session")
def stages(compare_runs):
    return compared(compare_runs, STAGES, "--pp", "2", ranks=GPUS // 2 * 2)


def assert_replayed(case, result, chunks):
    assert_as_eager(result)
    replays = 2 * chunks * case["microbatches"]
    if case["holds"] == "layer":
        replays *= case["layers"]
    skipped = 2 * chunks if case.get("control") == "eager_micro_batch_on_one_rank" else 0
    assert result["replays"] == replays - skipped


@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize("case", ON_ONE_GPU, ids=name_of)
def test_two_chunks_on_one_gpu(on_one_gpu, case):
    assert_replayed(case, on_one_gpu[name_of(case)], 2)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", STAGES, ids=name_of)
def test_two_stages(stages, case):
    assert_replayed(case, stages[name_of(case)], case.get("virtual", 1))


@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_a_replay_that_does_nothing_changes_the_loss(compare_runs):
    case = COMMON | {"chunks_on_one_rank": True, "dtype": "bf16", "control": "dead_replay"}
    (result,) = compared(compare_runs, [case], ranks=1).values()
    assert_differs_from(result, 3)
