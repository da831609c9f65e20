"""Test that local graphs under DistributedDataParallel are bit-identical to eager.

Layouts: data parallel over all GPUs; tensor parallel; expert parallel; two pipeline stages with one or two model chunks
each. Models have 4 layers of TransformerEngine or Megatron. The first step is recorded; later steps replay.
"""

from typing import Any

import pytest

from tests.support.sample import name_of
from tests.support.trainings.compared import assert_as_eager, assert_differs_from, assert_went_on_eagerly
from tests.support.trainings.gpus import GPUS, SIZES

LOCAL: dict[str, Any] = SIZES | {"local": True, "wrapper": "ddp", "dtype": "bf16"}
MOE: dict[str, Any] = {"experts": 4, "moe_shared_expert_intermediate_size": 256, "modules": ["attn", "moe_router"]}
GROUPED: dict[str, Any] = {"experts": 8, "moe_use_grouped_tensor": True, "microbatches": 2}
DATA_PARALLEL: list[dict[str, Any]] = [
    {"dropout": 0.1, "microbatches": 2, "microbatches_later": 3},
    {"dtype": "fp32"},
    {"transformer_engine": False, "dropout": 0.1},
    {"overlap_param_gather": False},
    {"dropout": 0.1, "evaluates": True},
    {"gradient_accumulation_fusion": True, "microbatches": 2},
    {"recompute_modules": ["core_attn"]},
    {"recompute_modules": ["layernorm"], "microbatches": 2},
    {"dropout": 0.1, **MOE},
    {"recompute_modules": ["moe"], "microbatches": 2, **MOE},
    {"experts": 4, "moe_expert_capacity_factor": 1.0, "modules": [], "microbatches": 2},
    GROUPED,
    {"dropout": 0.1, "mtp": 1, "microbatches": 2},
    {"fp8": "delayed", "microbatches": 2},
    {"fp8": "tensorwise", "microbatches": 2},
    {"fp8": "delayed", "microbatches": 2, "evaluates": True},
    {"fp8": "tensorwise", "microbatches": 2, "evaluates": True},
    {"dropout": 0.1, "control": "local_graphs_recorded_again"},
]
TENSOR_PARALLEL: list[dict[str, Any]] = [
    {"dropout": 0.1, "sequence_parallel": True, "microbatches": 2},
    {"sequence_parallel": True, **GROUPED},
]
EXPERT_PARALLEL: list[dict[str, Any]] = [
    {"dropout": 0.1, "microbatches": 2, **MOE},
    *(
        GROUPED | case
        for case in (
            {},
            {"modules": ["attn", "moe_router", "moe_preprocess"]},
            {"gradient_accumulation_fusion": True},
            {"moe_shared_expert_intermediate_size": 256, "moe_shared_expert_overlap": True},
            {"moe_latent_size": 256},
        )
    ),
]
PIPELINE: list[dict[str, Any]] = [
    {"dropout": 0.1, "microbatches": 4},
    {"dropout": 0.1, "microbatches": 6, "microbatches_later": 3},
    {"microbatches": 3, **MOE},
    {"microbatches": 4, "fp8": "delayed"},
    {"virtual": 2, "dropout": 0.1, "microbatches": 4, "evaluates": True},
    {"virtual": 2, "microbatches": 4, **MOE},
    {"virtual": 2, **GROUPED, "microbatches": 4},
]
SURVIVED: dict[str, Any] = {"dropout": 0.1, "control": "failed_local_capture"}
DEAD_REPLAY: dict[str, Any] = {"control": "dead_local_replay"}
# Options, cases, and the minimum number of GPUs
LAYOUTS: dict[str, tuple[list[str], list[dict[str, Any]], int]] = {
    "data parallel": ([], [*DATA_PARALLEL, SURVIVED, DEAD_REPLAY], 1),
    "TP2": (["--tp", "2", "--etp", "1"], TENSOR_PARALLEL, 2),
    "EP2": (["--ep", "2"], EXPERT_PARALLEL, 2),
    "PP2": (["--pp", "2"], PIPELINE, 2),
}
RUNS = [layout for layout in LAYOUTS if LAYOUTS[layout][2] <= max(GPUS, 1)]
EQUAL = [(layout, case) for layout in RUNS for case in LAYOUTS[layout][1] if case not in (SURVIVED, DEAD_REPLAY)]


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


def test_training_continues_eagerly_after_a_failed_capture(train):
    assert_went_on_eagerly(train("data parallel", SURVIVED))


def test_dead_replay_changes_the_loss_of_the_second_step(train):
    assert_differs_from(train("data parallel", DEAD_REPLAY), 1)
