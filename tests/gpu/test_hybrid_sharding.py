"""Test that graphs are bit-identical to eager under HSDP with two replicas, or with one replica on one GPU."""

from typing import Any

import pytest

from tests.support.sample import name_of
from tests.support.trainings.compared import assert_as_eager
from tests.support.trainings.gpus import GPUS, SIZES

HYBRID: dict[str, Any] = {"dtype": "bf16", "num_distributed_optimizer_instances": 2}
OPTIM = HYBRID | {"outer_dp_sharding_strategy": "optim"}
CASES: list[dict[str, Any]] = [
    HYBRID | {"holds": "model", "microbatches": 2},
    OPTIM | {"holds": "model", "microbatches": 3, "dropout": 0.1, "evaluates": "often"},
    OPTIM | {"holds": "model", "norm_on_device": True, "gradient_accumulation_fusion": True},
    OPTIM | {"holds": "model", "sequences_later": [512, 1024], "microbatches": 2},
    OPTIM | {"holds": "model", "warmup": 0, "dropout": 0.1},
    OPTIM | {"holds": "model", "control": "captured_again", "microbatches_later": 2},
    HYBRID | {"microbatches": 2, "dropout": 0.1},
    OPTIM | {"microbatches": 2, "evaluates": True},
    OPTIM | {"holds": "layer", "microbatches": 2},
    OPTIM | {"experts": 4, "modules": ["attn", "moe_router", "moe_preprocess"], "microbatches": 2},
]

pytestmark = pytest.mark.skipif(GPUS > 1 and GPUS % 2 == 1, reason="needs an even number of GPUs")


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_graphs_are_bit_identical_to_eager(together, case):
    options = "--instances", str(min(GPUS, 2))
    result = together(SIZES | case, [SIZES | each for each in CASES], *options)
    assert_as_eager(result)
    microbatches = case.get("microbatches_later") or case.get("microbatches", 1)
    by_layer = case.get("modules") or case.get("holds") == "layer"
    assert result["replays"] == 2 * microbatches * (4 if by_layer else 1)
