"""Test that graphs under DistributedDataParallel are bit-identical to eager.

Layouts: data parallel over all GPUs; two pipeline stages with one or two model chunks each; tensor or context parallel
2; expert parallel 2, with and without overlapped communication. Models have 4 TransformerEngine layers and the
distributed optimizer.
"""

from typing import Any

import pytest

from tests.support.sample import name_of
from tests.support.trainings.compared import assert_as_eager
from tests.support.trainings.gpus import DETERMINISTIC, GPUS, SIZES

DDP: dict[str, Any] = SIZES | {"wrapper": "ddp", "dtype": "bf16"}
MOE: dict[str, Any] = {
    "experts": 4,
    "moe_shared_expert_intermediate_size": 256,
    "modules": ["attn", "moe_router", "moe_preprocess"],
}
GROUPED: dict[str, Any] = {"experts": 8, "moe_use_grouped_tensor": True}
DATA_PARALLEL: list[dict[str, Any]] = [
    {"dropout": 0.1, "microbatches": 2, "microbatches_later": 3},
    {"overlap_param_gather": False},
    {"warmup": 0},
    {"dropout": 0.1, **MOE},
    {"dropout": 0.1, "mtp": 1},
    {"experts": 4, "moe_expert_capacity_factor": 1.0, "modules": ["attn", "moe"]},
    {**GROUPED, "microbatches": 2},
    {"fp8": "delayed", "microbatches": 2},
    {"fp8": "delayed", "microbatches": 2, "evaluates": True},
    {"fp8": "tensorwise", "microbatches": 2, "evaluates": True},
]
PIPELINE: list[dict[str, Any]] = [
    {"dropout": 0.1, "microbatches": 4},
    {"microbatches": 3, **MOE},
    {"microbatches": 4, "fp8": "delayed"},
    {"virtual": 2, "microbatches": 4},
    {"virtual": 2, "microbatches": 4, **MOE},
    {"virtual": 2, "dropout": 0.1, "microbatches": 4, "evaluates": True},
    {"microbatches": 4, **GROUPED},
    {"virtual": 2, "microbatches": 4, **GROUPED},
]
TENSOR_PARALLEL: list[dict[str, Any]] = [{"sequence_parallel": True, "microbatches": 2, **GROUPED}]
CONTEXT_PARALLEL: list[dict[str, Any]] = [GROUPED]
EXPERT_PARALLEL: list[dict[str, Any]] = [
    GROUPED | {"microbatches": 2, **case}
    for case in (
        {"gradient_accumulation_fusion": True},
        {"moe_token_dispatcher_type": "allgather"},
        {"moe_shared_expert_intermediate_size": 256, "moe_shared_expert_overlap": True},
        {"moe_latent_size": 256},
        {"modules": MOE["modules"]},
    )
]
OVERLAP: list[dict[str, Any]] = [
    {"overlap_moe_expert_parallel_comm": True, "microbatches": 3, **MOE, **case}
    for case in ({}, {"dropout": 0.1, "modules": ["attn"]}, {"moe_use_grouped_tensor": True, "dropout": 0.1})
]
# Without blocking launches, eager runs differ from each other in weight gradients of attention.
DELAYED: list[dict[str, Any]] = [OVERLAP[0] | {"gradient_accumulation_fusion": True, "delay_wgrad_compute": True}]
BLOCKING = "EP2, blocking launches"
LAYOUTS = {
    "data parallel": ([], DATA_PARALLEL, 1),
    "PP2": (["--pp", "2"], PIPELINE, 2),
    "TP2": (["--tp", "2", "--etp", "1"], TENSOR_PARALLEL, 2),
    "CP2": (["--cp", "2"], CONTEXT_PARALLEL, 2),
    "EP2": (["--ep", "2"], [*EXPERT_PARALLEL, *OVERLAP], 2),
    BLOCKING: (["--ep", "2"], DELAYED, 2),
}
RUNS = [layout for layout in LAYOUTS if LAYOUTS[layout][2] <= max(GPUS, 1)]
CASES = [(layout, case) for layout in RUNS for case in LAYOUTS[layout][1]]


@pytest.mark.parametrize(
    ("layout", "case"),
    [pytest.param(layout, case, id=f"{layout}: {name_of(case)}") for layout, case in CASES],
)
def test_graphs_are_bit_identical_to_eager(together, layout, case):
    options, cases, _ = LAYOUTS[layout]
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"} if layout == BLOCKING else {}
    result = together(DDP | case, [DDP | each for each in cases], *options, **blocking)
    assert_as_eager(result)
    stages = 2 if layout == "PP2" else 1
    in_turn = stages > 1 or case.get("overlap_moe_expert_parallel_comm")
    slots = case["microbatches"] if in_turn else 1
    assert result["graphs"] == (4 + case.get("mtp", 0)) * slots / stages


@pytest.mark.skipif(GPUS == 1, reason="two pipeline stages need two GPUs")
@pytest.mark.parametrize("virtual", [None, 2])
def test_pipeline_recaptures_for_another_number_of_micro_batches(compare_runs, virtual):
    case = DDP | {"microbatches": 4, "microbatches_later": 2, "dropout": 0.1, "virtual": virtual}
    (result,) = compare_runs([case], "--pp", "2", "--stop-at-error", ranks=GPUS, environment=DETERMINISTIC)
    assert_as_eager(result)
    assert result["graphs"] == 2 * 2  # layers per stage, micro-batches
