"""Test that graphs of whole chunks in two pipeline stages are bit-identical to eager."""

from typing import Any

import pytest

from tests.support.sample import name_of
from tests.support.trainings.compared import assert_as_eager, assert_differs_from
from tests.support.trainings.gpus import GPUS, SIZES
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


RANKS = GPUS // 2 * 2

pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


@pytest.mark.parametrize("case", STAGES, ids=name_of)
def test_two_stages_are_bit_identical_to_eager(together, case):
    result = together(SIZES | case, [SIZES | each for each in STAGES], "--pp", "2", ranks=RANKS)
    assert_as_eager(result)
    replays = 2 * case.get("virtual", 1) * case["microbatches"]
    if case["holds"] == "layer":
        replays *= case["layers"]
    assert result["replays"] == replays


def test_dead_replay_changes_the_loss(together):
    case = SIZES | COMMON | {"layers": 4, "dtype": "bf16", "control": "dead_replay"}
    assert_differs_from(together(case, [case], "--pp", "2", ranks=RANKS), 3)
