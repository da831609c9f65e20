"""Test that megatron-core's local graphs under DistributedDataParallel are bit-identical to eager with this patch.

Models have 4 layers of TransformerEngine or Megatron. The first step is recorded; later steps replay.
"""

from typing import Any

import pytest

from tests.support.sample import name_of
from tests.support.trainings.compared import assert_as_eager, assert_differs_from
from tests.support.trainings.gpus import GPUS, SIZES

LOCAL: dict[str, Any] = SIZES | {"local": True, "wrapper": "ddp", "dtype": "bf16"}
DATA_PARALLEL: list[dict[str, Any]] = [{"microbatches": 2, "microbatches_later": 3, "evaluates": True}]
TENSOR_PARALLEL: list[dict[str, Any]] = [{"sequence_parallel": True, "microbatches": 2}]
DEAD_REPLAY: dict[str, Any] = {"control": "dead_local_replay"}
# Options, cases, and the minimum number of GPUs
LAYOUTS: dict[str, tuple[list[str], list[dict[str, Any]], int]] = {
    "data parallel": ([], [*DATA_PARALLEL, DEAD_REPLAY], 1),
    "TP2": (["--tp", "2", "--etp", "1"], TENSOR_PARALLEL, 2),
}
RUNS = [layout for layout in LAYOUTS if LAYOUTS[layout][2] <= max(GPUS, 1)]
EQUAL = [(layout, case) for layout in RUNS for case in LAYOUTS[layout][1] if case != DEAD_REPLAY]


@pytest.fixture
def train(together):
    """Return a function that trains a case of a layout."""

    def run(layout, case):
        options, cases, _ = LAYOUTS[layout]
        return together(LOCAL | case, [LOCAL | each for each in cases], *options)

    return run


@pytest.mark.parametrize(("layout", "case"), [pytest.param(*run, id=f"{run[0]}: {name_of(run[1])}") for run in EQUAL])
def test_graphs_are_bit_identical_to_eager(train, layout, case):
    result = train(layout, case)
    assert_as_eager(result)
    assert result["graphs"] == 4


def test_dead_replay_changes_the_loss_of_the_second_step(train):
    assert_differs_from(train("data parallel", DEAD_REPLAY), 1)
