"""Test that training some of the parameters with graphs is bit-identical to eager, on two CPU ranks.

If the first layers and the embedding are frozen, no tensor in these layers requires gradients.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import assert_as_eager
from tests.support.trainings.models import FULL_RECOMPUTE

SIZES: dict[str, Any] = {"layers": 3, "warmup": 1, "steps": 5}
ADAPTERS: dict[str, Any] = {"adapters": 4}
FIRST_LAYERS: dict[str, Any] = {"frozen": r"embedding|layers\.[01]\.", "tied": False}
EXPERTS: dict[str, Any] = {"experts": 4, "moe_use_grouped_tensor": True}
PARTS = ["attn", "moe_router", "moe_preprocess"]

# Each case with the expected number of replays in the last step
CASES: list[tuple[dict[str, Any], int]] = [
    ({"holds": "model", "evaluates": True, "dropout": 0.1, **ADAPTERS}, 2),
    ({"holds": "model", "microbatches": 2, "gradient_accumulation_fusion": True, **ADAPTERS}, 4),
    ({"holds": "model", "dtype": "bf16", "norm_on_device": True, **ADAPTERS}, 2),
    ({"holds": "layer", "microbatches": 2, **ADAPTERS}, 12),
    ({"holds": "layer", "data_parallel_sharding_strategy": "optim_grads", **ADAPTERS}, 6),
    ({"modules": ["attn"], **ADAPTERS}, 6),
    ({"modules": ["mlp"], **ADAPTERS}, 6),
    ({"holds": "model", "microbatches": 2, **FIRST_LAYERS}, 4),
    ({"holds": "model", "layers": 4, **FIRST_LAYERS}, 2),
    ({"holds": "layer", **FIRST_LAYERS}, 4),  # forward only in the first two layers
    ({"holds": "layer", "data_parallel_sharding_strategy": "no_shard", **FIRST_LAYERS}, 4),
    ({"holds": "model", "frozen": "mlp", **FULL_RECOMPUTE}, 2),
    ({"holds": "model", "frozen": "mtp", "mtp": 1}, 2),
    ({"holds": "model", "frozen": "experts", **EXPERTS}, 2),
    ({"modules": PARTS, "frozen": "embedding|linear", **EXPERTS}, 6),
    ({"holds": "layer", "wrapper": "ddp", **ADAPTERS}, 6),
    ({"holds": "layer", "wrapper": "ddp", **FIRST_LAYERS}, 4),
    ({"holds": "model", "decoupled_lr": 0.01, "dtype": "bf16", "thawed": 3}, 2),
    ({"holds": "layer", "decoupled_lr": 0.01, "thawed": 3}, 6),
]
QUICK = CASES[0], CASES[6], CASES[9], CASES[11], CASES[15]


@pytest.mark.parametrize(("case", "replays"), mostly_long(CASES, *QUICK))
def test_partly_trained_model_is_bit_identical_to_eager(trained, case, replays):
    result = trained(SIZES | case)
    assert_as_eager(result)
    assert result["replays"] == replays


def test_freezing_between_steps_is_an_error(trained):
    result = trained(SIZES | {"frozen_later": r"layers\.1\."})
    assert "decoder.layers.1.self_attention.linear_proj.weight is off" in result["error"]
    assert "freeze parameters before wrapping" in result["error"]
