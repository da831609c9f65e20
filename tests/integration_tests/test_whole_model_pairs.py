"""What graphs of the whole model hold, two and more kinds of it together: bit for bit as eagerly, on CPU ranks.

Pairs of flags are in ``test_pairs.py``; here are those that its command lines do not reach.
"""

from typing import Any

import pytest

from tests.support.trainings.compared import assert_as_eager
from tests.support.trainings.evaluations import replays_of_evaluations
from tests.support.trainings.launch import name_of

SIZES: dict[str, Any] = {"layers": 2, "steps": 6, "microbatches": 2, "holds": None}
STAGES: dict[str, Any] = {"layers": 4, "microbatches": 4}
FULL = ["recompute_granularity='full'", "recompute_method='uniform'", "recompute_num_layers=1"]
PACKED: dict[str, Any] = {"packed": 5, "micro_batch": 1, "positions": "none"}
LEARNED: dict[str, Any] = {**PACKED, "positions": "learned_absolute"}
PADDED: dict[str, Any] = {"experts": 4, "capacity": 1.0}
FP8_PARAMS: dict[str, Any] = {"fp8": "delayed", "fp8_params": True}
# By the layout of ranks, and how many there are.
TOGETHER: dict[tuple[str, int], list[dict[str, Any]]] = {
    ("", 2): [
        {**PACKED, "pattern": "*-*-/*-", "evaluates": True},
        {**FP8_PARAMS, "mtp": 1, "dropout": 0.1, "evaluates_often": True},
        {"config": FULL, "mtp": 1, "dtype": "bf16", "evaluates_often": True},
        {"dtype": "fp16", "mtp": 2, "steps": 9, "evaluates": True},  # whose loss scale changes
        {**PADDED, "mtp": 1, "recompute": ["moe"]},
    ],
    ("--cp 2", 2): [
        {**PADDED, "positions": "mrope", "dropout": 0.1},
        {**PACKED, "experts": 4, "grouped_tensor": True, "dtype": "bf16", "evaluates": True},
    ],
    ("--pp 2", 2): [
        {**STAGES, **FP8_PARAMS, "virtual": 2, "mtp": 1, "tied": False},
        {**STAGES, "fp8": "tensorwise", "fp8_params": True, "evaluates": True, "evaluated_sequence": 48},
        {**STAGES, **PACKED, "pattern": "*-|*-/*-", "evaluates": True},
        {**STAGES, "dtype": "fp16", "mtp": 1, "steps": 9, "virtual": 2},
    ],
    ("--cp 2 --pp 2", 4): [
        {**STAGES, "mtp": 1, "dropout": 0.1, "evaluates_often": True},
        {**STAGES, **LEARNED, "mtp": 1, "virtual": 2, "tied": False, "evaluates": True},
        {**STAGES, "fp8": "delayed", "positions": "mrope", "tied": False, "evaluates": True},
    ],
    ("--cp 2 --tp 2", 4): [{**LEARNED, "mtp": 1, "evaluates": True}],
    ("--cp 2 --instances 2", 4): [
        {"instances": 2, "outer": "optim", "mtp": 1, "positions": "mrope", "evaluates": True},
        {"instances": 2, **PACKED},
    ],
}
CASES = [(layout, ranks, case) for (layout, ranks), cases in TOGETHER.items() for case in cases]


@pytest.mark.parametrize(
    ("layout", "ranks", "case"),
    [
        pytest.param(*each, id=" ".join([*each[0].split(), name_of(each[2])]), marks=() if quick else pytest.mark.long)
        for each in CASES
        for quick in (each[2] in (CASES[0][2], CASES[9][2]),)
    ],
)
def test_they_train_bit_for_bit_as_eagerly(compare_runs, layout, ranks, case):
    case = SIZES | case
    (result,) = compare_runs([case], *layout.split(), ranks=ranks)
    assert_as_eager(result)
    chunks = case.get("virtual", 1)
    assert result["graphs"] == 0
    assert result["step_replays"][3:] == [2 * chunks * case["microbatches"]] * (case["steps"] - 3)
    assert result["evaluation_replays"] == [chunks * replays for replays in replays_of_evaluations(case, 1)]
