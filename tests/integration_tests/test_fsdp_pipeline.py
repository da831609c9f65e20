"""Pipeline stages under Megatron-FSDP, with a graph per layer and micro-batch, train bit for bit as eagerly.

Two CPU ranks are two stages, each with one data-parallel rank. More data-parallel ranks are in ``tests/gpu``.
"""

from typing import Any

import pytest

from tests.support.launch import name_of

SIZES: dict[str, Any] = {"layers": 4, "steps": 8, "microbatches": 4, "tied": False}
CASES: list[dict[str, Any]] = [
    {},
    {"dtype": "bf16", "dropout": 0.1, "modules": ["attn"]},
    {"evaluates": True, "positions": "mrope"},
    {"dropout": 0.1, "experts": 4, "modules": ["attn", "moe_router", "moe_preprocess"]},
]


@pytest.fixture(scope="module")
def results(compare_runs):
    """The result of each case, by its name."""
    found = compare_runs([SIZES | case for case in CASES], "--pp", "2")
    return {name_of(case): result for case, result in zip(CASES, found, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_graphs_train_bit_for_bit_as_eager(results, case):
    result = results[name_of(case)]
    assert not result["error"]
    assert result["differences"] == []
    slots = SIZES["layers"] // 2 * SIZES["microbatches"]  # of the layers of a stage
    assert result["graphs"] == slots
    assert result["replays"] == 2 * slots
