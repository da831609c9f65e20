"""Test that local graphs under DistributedDataParallel are bit-identical to eager.

Layouts: data parallel over all GPUs; tensor parallel; expert parallel; two pipeline stages with one or two model chunks
each. Models have 4 layers of TransformerEngine or Megatron. The first step is recorded; later steps replay.
"""

from typing import Any

import pytest

from tests.support.sample import name_of
from tests.support.trainings.compared import assert_as_eager, assert_differs_from
from tests.support.trainings.gpus import GPUS, SIZES

LOCAL: dict[str, Any] = SIZES | {"local": True, "wrapper": "ddp", "dtype": "bf16"}
MOE: dict[str, Any] = {"experts": 4, "modules": ["attn", "moe_router"], "microbatches": 2}
GROUPED: dict[str, Any] = {
    **{"experts": 8, "moe_use_grouped_tensor": True, "modules": ["attn", "moe_router", "moe_preprocess"]},
    "microbatches": 2,
}
DATA_PARALLEL: list[dict[str, Any]] = [
    {"microbatches": 2, "microbatches_later": 3},
    {"dtype": "fp32"},
    {"transformer_engine": False},
    {"evaluates": True},
    {"dropout": 0.1},
    {"gradient_accumulation_fusion": True, "microbatches": 2},
    {"recompute_modules": ["core_attn"]},
    MOE,
    GROUPED,
    {**GROUPED, "modules": []},
    {"experts": 4, "moe_expert_capacity_factor": 1.0, "microbatches": 2},
    {"mtp": 1, "microbatches": 2},
    {"fp8": "delayed", "microbatches": 2},
    {"fp8": "tensorwise", "microbatches": 2},
]
TENSOR_PARALLEL: list[dict[str, Any]] = [{"sequence_parallel": True, "microbatches": 2}]
EXPERT_PARALLEL: list[dict[str, Any]] = [MOE, GROUPED, {**GROUPED, "modules": []}]
PIPELINE: list[dict[str, Any]] = [{"microbatches": 4, "deallocate_pipeline_outputs": False}]
DEAD_REPLAY: dict[str, Any] = {"control": "dead_local_replay"}
# Options, cases, and the minimum number of GPUs
LAYOUTS: dict[str, tuple[list[str], list[dict[str, Any]], int]] = {
    "data parallel": ([], [*DATA_PARALLEL, DEAD_REPLAY], 1),
    "TP2": (["--tp", "2", "--etp", "1"], TENSOR_PARALLEL, 2),
    "EP2": (["--ep", "2"], EXPERT_PARALLEL, 2),
    "PP2": (["--pp", "2"], PIPELINE, 2),
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
    in_a_layer = 2 if "moe_router" in case.get("modules", []) else 1
    in_a_stage = 2 * case["microbatches"] if layout == "PP2" else 4 + case.get("mtp", 0)
    assert result["graphs"] == in_a_layer * in_a_stage


def test_dead_replay_changes_the_loss_of_the_second_step(train):
    assert_differs_from(train("data parallel", DEAD_REPLAY), 1)
