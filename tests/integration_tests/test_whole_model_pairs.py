"""Test whole-model graphs with combinations of features that test_pairs.py does not cover, on CPU ranks."""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import assert_as_eager, replays_of_evaluations
from tests.support.trainings.models import FULL_RECOMPUTE

SIZES: dict[str, Any] = {"layers": 2, "steps": 6, "microbatches": 2, "holds": None}
STAGES: dict[str, Any] = {"layers": 4, "microbatches": 4}
PACKED: dict[str, Any] = {"packed": 5, "micro_batch": 1, "positions": "none"}
LEARNED: dict[str, Any] = {**PACKED, "positions": "learned_absolute"}
PADDED: dict[str, Any] = {"experts": 4, "moe_expert_capacity_factor": 1.0}
FP8_PARAMS: dict[str, Any] = {"fp8": "delayed", "fp8_param": True}
HSDP: dict[str, Any] = {"num_distributed_optimizer_instances": 2}
# Options of compare_runs.py, the number of ranks, and the case
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("", 2, {**PACKED, "pattern": "*-*-/*-", "evaluates": True}),
    ("", 2, {**FP8_PARAMS, "mtp": 1, "dropout": 0.1, "evaluates": "often"}),
    ("", 2, {**FULL_RECOMPUTE, "mtp": 1, "dtype": "bf16", "evaluates": "often"}),
    ("", 2, {"dtype": "fp16", "mtp": 2, "steps": 9, "evaluates": True}),  # the loss scale changes
    ("", 2, {**PADDED, "mtp": 1, "recompute_modules": ["moe"]}),
    ("--cp 2", 2, {**PADDED, "positions": "mrope", "dropout": 0.1}),
    ("--cp 2", 2, {**PACKED, "experts": 4, "moe_use_grouped_tensor": True, "dtype": "bf16", "evaluates": True}),
    ("--pp 2", 2, {**STAGES, **FP8_PARAMS, "virtual": 2, "mtp": 1, "tied": False}),
    ("--pp 2", 2, {**STAGES, "fp8": "tensorwise", "fp8_param": True, "evaluates": True, "evaluated_sequence": 48}),
    ("--pp 2", 2, {**STAGES, **PACKED, "pattern": "*-|*-/*-", "evaluates": True}),
    ("--pp 2", 2, {**STAGES, "dtype": "fp16", "mtp": 1, "steps": 9, "virtual": 2}),
    ("--cp 2 --pp 2", 4, {**STAGES, "mtp": 1, "dropout": 0.1, "evaluates": "often"}),
    ("--cp 2 --pp 2", 4, {**STAGES, **LEARNED, "mtp": 1, "virtual": 2, "tied": False, "evaluates": True}),
    ("--cp 2 --pp 2", 4, {**STAGES, "fp8": "delayed", "positions": "mrope", "tied": False, "evaluates": True}),
    ("--cp 2 --tp 2", 4, {**LEARNED, "mtp": 1, "evaluates": True}),
    ("--cp 2 --instances 2", 4, HSDP | {"outer_dp_sharding_strategy": "optim", "mtp": 1, "positions": "mrope"}),
    ("--cp 2 --instances 2", 4, HSDP | PACKED),
]


@pytest.mark.parametrize(("layout", "ranks", "case"), mostly_long(CASES, CASES[1]))
def test_graphs_are_bit_identical_to_eager(trained, layout, ranks, case):
    case = SIZES | case
    result = trained(case, *layout.split(), ranks=ranks)
    assert_as_eager(result)
    chunks = case.get("virtual", 1)
    assert result["graphs"] == 0
    assert result["step_replays"][3:] == [2 * chunks * case["microbatches"]] * (case["steps"] - 3)
    assert result["evaluation_replays"] == [chunks * replays for replays in replays_of_evaluations(case, 1)]
