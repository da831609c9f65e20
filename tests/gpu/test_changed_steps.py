"""Test that graphs are recaptured for longer sequences, and that every step is bit-identical to eager.

Data parallel over all GPUs, under Megatron-FSDP and DistributedDataParallel. `test_ddp_graphs.py` changes the number of
micro-batches in a pipeline.
"""

from typing import Any

import pytest

from megatron.core.transformer._cuda_graphs.te.changed_shapes import STEPS
from tests.support.sample import name_of
from tests.support.trainings.compared import assert_as_eager
from tests.support.trainings.gpus import SIZES

CAPTURED_AFTER = 3
# Steps from a capture to the recapture if the shape changes in the step after the capture.
CAPTURED_AGAIN_AFTER = 2 * STEPS + 1
TURN = CAPTURED_AGAIN_AFTER + 2
TWICE: dict[str, Any] = SIZES | {
    "dtype": "bf16",
    "sequence": 128,
    "sequences_later": [512, 1024],
    "turn": TURN,
    "steps": CAPTURED_AFTER + 1 + 2 * TURN,
}
CASES: list[dict[str, Any]] = [
    {"dropout": 0.1, "microbatches": 2},
    {"holds": "layer", "evaluates": True},
    {"holds": "model", "optimizer_graph": True},
    {"modules": ["attn"], "micro_batches_later": [1, 2]},
    {"wrapper": "ddp", "microbatches": 2},
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_graphs_are_recaptured_for_each_sequence_length(together, case):
    result = together(TWICE | case, [TWICE | each for each in CASES])
    assert_as_eager(result)
    second = CAPTURED_AFTER + CAPTURED_AGAIN_AFTER
    third = second + CAPTURED_AGAIN_AFTER
    replayed = [CAPTURED_AFTER, *range(second, CAPTURED_AFTER + 1 + TURN), *range(third, TWICE["steps"])]
    assert [step for step, replays in enumerate(result["step_replays"]) if replays] == replayed
