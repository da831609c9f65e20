"""Test that training some of the parameters with graphs is bit-identical to eager, on GPUs."""

from typing import Any

import pytest

from tests.support.sample import name_of
from tests.support.trainings.compared import assert_as_eager
from tests.support.trainings.gpus import SIZES

ADAPTERS: dict[str, Any] = {"adapters": 8, "dtype": "bf16"}
FIRST_LAYERS: dict[str, Any] = {"frozen": r"embedding|layers\.[01]\.", "tied": False, "dtype": "bf16"}
CASES: list[dict[str, Any]] = [
    {"holds": "model", "dropout": 0.1, "evaluates": True, **ADAPTERS},
    {"holds": "model", "gradient_accumulation_fusion": True, "microbatches": 2, **ADAPTERS},
    {"holds": "layer", "microbatches": 2, **ADAPTERS},
    {"modules": ["attn"], **ADAPTERS},
    {"holds": "model", "microbatches": 2, **FIRST_LAYERS},
    {"holds": "layer", "microbatches": 2, **FIRST_LAYERS},
    {"holds": "model", "dtype": "bf16", "experts": 8, "moe_use_grouped_tensor": True, "frozen": "experts"},
    {"holds": "layer", "wrapper": "ddp", **ADAPTERS},
    {"holds": "model", "dtype": "bf16", "decoupled_lr": 0.01, "thawed": 6},
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_partly_trained_model_is_bit_identical_to_eager(together, case):
    result = together(SIZES | case, [SIZES | each for each in CASES])
    assert_as_eager(result)
    assert result["replays"]
