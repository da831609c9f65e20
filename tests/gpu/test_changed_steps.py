"""Test that captures of longer sequences are bit-identical to eager.

Data parallel over all GPUs, under Megatron-FSDP and DistributedDataParallel. `test_ddp_graphs.py` changes the number of
micro-batches in a pipeline.
"""

from typing import Any

import pytest

from tests.support.sample import name_of
from tests.support.trainings.compared import assert_as_eager
from tests.support.trainings.gpus import SIZES

CAPTURED_AFTER = 3
TWICE: dict[str, Any] = SIZES | {
    "dtype": "bf16",
    "sequence": 128,
    "sequences_later": [512, 1024],
    "turn": 2,
    "steps": CAPTURED_AFTER + 5,
    "control": "captured_for_each_shape",
}
CASES: list[dict[str, Any]] = [
    {"dropout": 0.1, "microbatches": 2},
    {"holds": "layer", "evaluates": True},
    {"holds": "model"},
    {"modules": ["attn"], "micro_batches_later": [1, 2]},
    {"wrapper": "ddp", "microbatches": 2},
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_own_loop_captures_each_shape(together, case):
    result = together(TWICE | case, [TWICE | each for each in CASES])
    assert_as_eager(result)
    assert [replays > 0 for replays in result["step_replays"]] == [False] * CAPTURED_AFTER + [True] * 5
