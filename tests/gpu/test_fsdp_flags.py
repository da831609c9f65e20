"""Test that graphs under Megatron-FSDP are bit-identical to eager with additional flags, on GPUs.

Layouts: data parallel over all GPUs; context parallel 2; two pipeline stages with one or two chunks; expert parallel 2.
With four or more GPUs, each layout has several data-parallel ranks.
"""

import pytest

from tests.support.sample import name_of
from tests.support.trainings.compared import assert_as_eager, captures_model, replays_of_evaluations
from tests.support.trainings.gpus import DETERMINISTIC, GPUS, SIZES

OVERLAPPED = {"experts": 4, "moe_shared_expert_intermediate_size": 256, "moe_shared_expert_overlap": True}
HYBRID = {"pattern": "M*EM", "experts": 4}
BEFORE_EXPERTS = ["attn", "moe_router", "moe_preprocess"]
STAGES = {"tied": False, "microbatches": 4, "holds": "layer"}
CASES: dict[str, list[dict]] = {
    "data parallel": [
        {"dtype": "fp16", "dropout": 0.1, "microbatches": 2},
        {"dtype": "fp16", "modules": ["attn"]},
        {"dtype": "bf16", "positions": "yarn", "microbatches": 2},
        {"dtype": "bf16", "positions": "mrope", "microbatches": 2},
        {"dtype": "bf16", "positions": "mrope", "microbatches": 2, "modules": ["attn"]},
        {"dtype": "bf16", "multi_latent_attention": True, "microbatches": 2},
        {"dtype": "bf16", "multi_latent_attention": True, "modules": ["attn"]},
        {"dtype": "bf16", "modules": ["mlp"], "dropout": 0.1},
        {"dtype": "bf16", "modules": ["attn", "mlp"]},
        {"dtype": "bf16", **OVERLAPPED, "modules": ["attn", "moe_router", "moe_preprocess"], "microbatches": 2},
        {"dtype": "bf16", **OVERLAPPED, "modules": ["moe_router"]},
        {"dtype": "bf16", **OVERLAPPED, "moe_expert_capacity_factor": 1.0, "microbatches": 2},
        {"dtype": "bf16", "experts": 4, "moe_expert_capacity_factor": 1.0, "dropout": 0.1},
        {"dtype": "bf16", "experts": 4, "modules": BEFORE_EXPERTS, "moe_latent_size": 256},
        {"dtype": "bf16", "fp8": "delayed", "fp8_param": True, "microbatches": 2},
        {"dtype": "bf16", "fp8": "tensorwise", "fp8_param": True, "microbatches": 2},
        {"dtype": "bf16", "nccl_ub": True},
        {
            "dtype": "bf16",
            "nccl_ub": True,
            "average_in_collective": True,
            "gradient_accumulation_fusion": True,
            "microbatches": 2,
        },
        {"dtype": "bf16", "average_in_collective": True, "experts": 4, "modules": BEFORE_EXPERTS},
        {"dtype": "bf16", "model": "captions", "microbatches": 2},
        {"dtype": "bf16", "packed": 8, "modules": ["attn"], "evaluates": True},
        {"dtype": "bf16", "packed": 8, "holds": "layer", "positions": "none"},
        {"dtype": "bf16", "pattern": "*-*-", "holds": "layer"},
        {"dtype": "bf16", **HYBRID, "modules": ["attn", "mamba", "moe_router", "moe_preprocess"]},
        {"dtype": "bf16", **HYBRID, "moe_expert_capacity_factor": 1.0, "evaluates": True},
        {"dtype": "bf16", "holds": "model", "fp8": "delayed", "fp8_param": True, "evaluates": "often"},
        {"dtype": "bf16", "holds": "model", "positions": "mrope", "microbatches": 2},
        {"dtype": "bf16", "holds": "model", "packed": 8, "dropout": 0.1, "microbatches": 2, "evaluates": True},
        {"dtype": "bf16", "holds": "model", "packed": 8, "mtp": 1, "positions": "learned_absolute"},
        {"dtype": "bf16", "holds": "model", "pattern": "M-*-M*", "dropout": 0.1, "microbatches": 2},
        {"dtype": "bf16", "holds": "model", "pattern": "M*-M/*M", "microbatches": 2, "evaluates": True},
        {"dtype": "bf16", "holds": None, **HYBRID, "moe_expert_capacity_factor": 1.0},
    ],
    "CP2": [
        {"dtype": "bf16", "modules": ["attn"]},
        {"dtype": "bf16", "holds": "model", "microbatches": 2, "evaluates": True},
        {"dtype": "bf16", "holds": "model", "dropout": 0.1, "positions": "yarn"},
        {"dtype": "bf16", "holds": "model", "mtp": 1},
        {"dtype": "bf16", "holds": "model", "positions": "mrope", "microbatches": 2},
        {"dtype": "bf16", "holds": "model", "packed": 8, "microbatches": 2, "evaluates": True},
        {"dtype": "bf16", "holds": "model", "packed": 8, "mtp": 1, "positions": "learned_absolute"},
        {"dtype": "bf16", "holds": "layer", "packed": 8, "positions": "none"},
        {"dtype": "bf16", "holds": "layer", "packed": 8},
    ],
    "PP2": [
        {"dtype": "bf16", **STAGES},
        {"dtype": "bf16", **STAGES, "dropout": 0.1, "modules": ["attn"]},
        {"dtype": "bf16", **STAGES, "dropout": 0.1, "evaluates": "often"},
        {"dtype": "bf16", **STAGES, "evaluates": True, "positions": "mrope"},
        {"dtype": "bf16", **STAGES, "experts": 4, "modules": ["attn", "moe_router", "moe_preprocess"]},
    ],
    "PP2 with VPP2": [
        {"dtype": "bf16", **STAGES, "virtual": 2},
        {"dtype": "bf16", **STAGES, "virtual": 2, "modules": ["attn"], "dropout": 0.1},
        {"dtype": "bf16", **STAGES, "virtual": 2, "layers": 12, "dropout": 0.1, "evaluates": True},
    ],
}
LAYOUTS = {
    "data parallel": [],
    "CP2": ["--cp", "2"],
    "PP2": ["--pp", "2"],
    "PP2 with VPP2": ["--pp", "2"],
}
RUNS = [layout for layout in LAYOUTS if GPUS != 1 or layout == "data parallel"]


@pytest.fixture(scope="session")
def train(compare_runs):
    """Return a function that trains a case in subprocesses, so that pytest survives crashes."""

    def result(layout: str, case: dict) -> dict:
        (compared,) = compare_runs(
            [SIZES | case],
            *LAYOUTS[layout],
            "--stop-at-error",
            ranks=GPUS,
            environment=DETERMINISTIC,
        )
        return compared

    return result


@pytest.mark.parametrize(
    ("layout", "case"),
    [pytest.param(layout, case, id=f"{layout}: {name_of(case)}") for layout in RUNS for case in CASES[layout]],
)
def test_graphs_are_bit_identical_to_eager(train, layout, case):
    result = train(layout, case)
    assert_as_eager(result)
    pattern = case.get("pattern", "").replace("/", "")
    layers = len(pattern) or case.get("layers", 4) * (2 if case.get("model") == "captions" else 1)
    of_a_pass = layers // 2 if "PP2" in layout else layers + case.get("mtp", 0)  # layers of a stage or of the model
    if captures_model(case):
        assert result["graphs"] == 0
        assert result["replays"] == 2 * case.get("microbatches", 1)
    else:
        slots = case["microbatches"] if "PP2" in layout else 1
        assert result["graphs"] == of_a_pass * slots
    packed_layers = "packed" in case and not captures_model(case)
    eager = "VPP2" in layout or "fp8_param" in case or packed_layers
    assert result["evaluation_replays"] == replays_of_evaluations(SIZES | case, 0 if eager else of_a_pass)
