"""With a graph per layer and one of the optimizer's step, a model trains bit for bit as it does eagerly.

The learning rate differs from step to step. Both runs have the same optimizer, which could be captured. Layers are
captured after 3 steps, the optimizer's step is in the fourth.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import Trained, assert_as_eager
from tests.support.trainings.launch import name_of

SIZES: dict[str, Any] = {"layers": 3, "steps": 7, "optimizer_graph": True}
CASES: list[dict[str, Any]] = [
    {},
    {"dtype": "bf16", "dropout": 0.1, "microbatches": 2},
    {"dtype": "bf16", "modules": ["attn"]},
    {"strategy": "optim_grads", "dtype": "bf16"},
    {"strategy": "optim"},
    {"strategy": "no_shard", "dtype": "bf16"},
    {"overlap_param_gather": False, "strategy": "optim_grads"},
    {"experts": 4, "modules": ["attn", "moe_router", "moe_preprocess"]},
    {"evaluates": True, "dtype": "bf16"},
    {"control": "captured_again", "dropout": 0.1},
    {"fsdp": False, "dtype": "bf16"},
]


@pytest.fixture(scope="session")
def results(compare_runs):
    """The result of each case, by its name."""
    return Trained(CASES, compare_runs, SIZES)


@pytest.mark.parametrize("case", mostly_long(CASES, *CASES[-2:]), ids=name_of)
def test_training_is_bit_for_bit_as_eager(results, case):
    result = results[name_of(case)]
    assert_as_eager(result)
    assert result["graphs"] == SIZES["layers"]
    assert len(result["losses"]) == SIZES["steps"]
