"""Test that graphs under Megatron-FSDP are bit-identical to eager in all layouts, with all graph modules.

Layouts: data parallel over all GPUs; tensor parallel 2 with sequence parallelism; expert parallel 2 with expert tensor
parallel 2 (four GPUs); dropless experts with expert parallel over all GPUs, or with expert parallel 2 and tensor or
context parallel 2. Models have 4 TransformerEngine MoE layers with shared experts. The data-parallel layout covers
additional flags.
"""

from itertools import product

import pytest

from tests.support.sample import name_of
from tests.support.trainings.compared import (
    assert_as_eager,
    assert_differs_from,
    captures_model,
    replays_of_evaluations,
)
from tests.support.trainings.gpus import GPUS, SIZES
from tests.support.trainings.models import FULL_RECOMPUTE

LAYOUTS = {
    "data parallel": ([], {}, 1),
    "TP2 with sequence parallelism": (["--tp", "2"], {"sequence_parallel": True}, 2),
    "EP2 with ETP2": (["--tp", "2", "--ep", "2", "--etp", "2"], {"sequence_parallel": True}, 4),
    "EP of all": (["--ep", str(GPUS)], {}, 2),
    "EP2 with DP2": (["--ep", "2"], {}, 4),
    "EP2 with TP2": (["--tp", "2", "--ep", "2", "--etp", "1"], {"sequence_parallel": True}, 2),
    "EP2 with CP2": (["--cp", "2", "--ep", "2"], {}, 2),
    "CP2 with TP2": (["--tp", "2", "--cp", "2"], {"sequence_parallel": True}, 4),
}
MOE: list[dict] = [
    {"dtype": dtype, "experts": 4, "moe_shared_expert_intermediate_size": 256, "modules": modules}
    for dtype, modules in product(
        ("bf16", "fp32"), (["attn"], ["attn", "moe_router", "moe_preprocess"], ["moe_router"])
    )
]
# Experts with token counts on the GPU, in graphs of whole layers or the whole model
GROUPED: list[dict] = [
    {"dtype": "bf16", "experts": 8, "moe_use_grouped_tensor": True, **case}
    for case in (
        {},
        {"holds": "layer", "dropout": 0.1, "microbatches": 2},
        {"holds": "model", "microbatches": 2, "evaluates": True},
        {"holds": "model", "moe_shared_expert_intermediate_size": 256, "dropout": 0.1, "evaluates": "often"},
        {"holds": "model", "multi_latent_attention": True},
        {"holds": "model", "recompute_modules": ["moe"], "moe_shared_expert_intermediate_size": 256},
        {
            "holds": "model",
            "recompute_modules": ["shared_experts", "layernorm"],
            "moe_shared_expert_intermediate_size": 256,
        },
        {"holds": "model", "recompute_modules": ["mla_up_proj"], "multi_latent_attention": True},
        {
            "holds": "model",
            **FULL_RECOMPUTE,
        },
        {"holds": "model", "moe_latent_size": 256, "moe_shared_expert_intermediate_size": 256},
        {"holds": "layer", "moe_latent_size": 256, "dropout": 0.1, "evaluates": True},
        {"holds": "model", "gradient_accumulation_fusion": True, "microbatches": 2},
        {"holds": None, "moe_layer_freq": [0, 1, 1, 1]},
        {"gradient_accumulation_fusion": True},
        {"modules": ["attn", "moe_router", "moe_preprocess"]},
        {"data_parallel_sharding_strategy": "optim_grads"},
        {"control": "failed_backward_capture", "dropout": 0.1},
    )
]
EXCHANGED: list[dict] = [
    {"dtype": "bf16", "experts": 8, "moe_use_grouped_tensor": True, "moe_token_dispatcher_type": dispatcher} | case
    for dispatcher in ("alltoall", "allgather")
    for case in (
        {"holds": "model", "microbatches": 2, "evaluates": True},
        {"holds": "model", "unbalanced": True},
        {"holds": "layer", "moe_shared_expert_intermediate_size": 256},
        {"modules": ["attn", "moe_router", "moe_preprocess"]},
    )
]
# One rank runs eagerly while the others replay.
BESIDE_REPLAYS: list[dict] = [
    {"dtype": "bf16", "sequences_later": [512], "later_on_one_rank": True} | case
    for case in (
        {"holds": None},
        {"holds": "layer", "microbatches": 2},
        {"holds": "model", "mtp": 1},
        {"holds": None, "mtp": 1},
        {"holds": None, "gradient_accumulation_fusion": True, "microbatches": 2},
        {"holds": "layer", "experts": 8, "moe_use_grouped_tensor": True},
        {"holds": None, "experts": 8, "moe_use_grouped_tensor": True},
        {"holds": "model", "experts": 8, "moe_use_grouped_tensor": True},
    )
]
BESIDE_REPLAYS += [
    {"dtype": "bf16", "control": "late_hook_on_one_rank", "experts": 4} | case
    for case in (
        {"modules": ["attn", "moe_router", "moe_preprocess"], "moe_shared_expert_intermediate_size": 256},
        {"holds": "layer", "moe_expert_capacity_factor": 1.0},
    )
]
MORE: list[dict] = [
    {"dtype": "bf16", "loss_outside": True, "evaluates": True},
    {"dtype": "bf16", "dropout": 0.1, "microbatches": 2},
    {"dtype": "bf16", "dropout": 0.1, "warmup": 0},
    {"dtype": "bf16", "dropout": 0.1, "microbatches": 2, "holds": "layer"},
    {"dtype": "bf16", "holds": "layer", "layers": 5, "evaluates": True},
    {"dtype": "bf16", "holds": "model", "layers": 5},
    {"dtype": "bf16", "holds": "model", "dropout": 0.1, "microbatches": 2, "evaluates": True},
    {"dtype": "fp32", "holds": "model", "microbatches": 1, "microbatches_later": 2, "warmup": 0},
    {"dtype": "bf16", "holds": "model", "gradient_accumulation_fusion": True, "microbatches": 2},
    {"dtype": "bf16", "holds": "model", "recompute_modules": ["core_attn", "mlp"]},
    {"dtype": "bf16", "holds": "model", "recompute_modules": ["layernorm"]},
    *(
        FULL_RECOMPUTE | {"dtype": "bf16", "recompute_method": method, "recompute_num_layers": number} | case
        for method, number, case in (
            ("uniform", 1, {"holds": "model", "evaluates": True}),
            ("uniform", 3, {"holds": "model", "microbatches": 2}),
            ("block", 2, {"holds": None, "gradient_accumulation_fusion": True}),
            ("block", 3, {"microbatches": 1, "microbatches_later": 2}),
        )
    ),
    {"dtype": "bf16", "holds": "model", "mtp": 1, "dropout": 0.1, "microbatches": 2, "evaluates": True},
    {"dtype": "bf16", "holds": "model", "mtp": 2, "microbatches": 4, "microbatches_later": 1, "tied": False},
    {"dtype": "bf16", "holds": "model", "mtp": 2, "warmup": 0},
    {"dtype": "bf16", "holds": "model", "control": "captured_again", "dropout": 0.1},
    {"dtype": "bf16", "holds": "model", "control": "failed_backward_capture", "dropout": 0.1},
    {"dtype": "bf16", "holds": "model", "control": "clipping_eager_on_one_rank"},
    {"dtype": "bf16", "holds": None, "dropout": 0.1, "microbatches": 2, "evaluates": "often"},
    *BESIDE_REPLAYS,
    {"dtype": "bf16", "gradient_accumulation_fusion": True, "warmup": 0, "layers": 5},
    {"dtype": "bf16", "recompute_modules": ["core_attn"]},
    {"dtype": "bf16", "recompute_modules": ["mlp"], "microbatches": 2},
    {"dtype": "bf16", "fp8": "delayed", "microbatches": 2},
    {"dtype": "bf16", "fp8": "tensorwise", "microbatches": 2},
    {"dtype": "bf16", "fp8": "delayed", "microbatches": 2, "evaluates": True},
    {"dtype": "bf16", "fp8": "tensorwise", "microbatches": 2, "evaluates": True},
    {"dtype": "bf16", "fp8": "delayed", "microbatches": 2, "evaluates": "often", "dropout": 0.1},
    {"dtype": "bf16", "fp8": "tensorwise", "evaluates": "often", "holds": "layer", "evaluated_sequence": 512},
    {"dtype": "bf16", "fp8": "delayed", "evaluates": "often", "experts": 4, "modules": ["attn"]},
    {"dtype": "bf16", "fp8": "blockwise", "holds": "layer", "microbatches": 2},
    {"dtype": "bf16", "fp8": "blockwise", "holds": "layer", "evaluates": "often", "dropout": 0.1},
    {"dtype": "bf16", "fp8": "blockwise", "evaluates": "often", "experts": 4, "modules": ["attn"]},
    {"dtype": "bf16", "experts": 4, "moe_expert_capacity_factor": 1.0, "modules": ["attn", "moe"]},
    {"dtype": "bf16", "model": "vision", "dropout": 0.1, "microbatches": 2},
    {"dtype": "bf16", "model": "vision", "microbatches": 2, "transformer_engine": False},
    {"dtype": "bf16", "data_parallel_sharding_strategy": "optim_grads"},
    {"dtype": "bf16", "evaluates": True, "dropout": 0.1},
    {"dtype": "bf16", "evaluates": "often", "dropout": 0.1, "microbatches": 2},
    {"dtype": "bf16", "evaluates": "often", "holds": "layer", "gradient_accumulation_fusion": True},
    {"dtype": "bf16", "evaluates": "often", "warmup": 0, "mtp": 1},
    {"dtype": "bf16", "evaluates": "often", "evaluated_sequence": 256},
    {"dtype": "bf16", "evaluates": True, "holds": "model", "control": "failed_capture_for_evaluation"},
    *({"evaluates": "often", "dropout": 0.1} | case for case in MOE[:3]),
    {
        "dtype": "bf16",
        "evaluates": "often",
        "experts": 4,
        "moe_expert_capacity_factor": 1.0,
        "modules": ["attn", "moe"],
    },
    {"dtype": "bf16", "control": "failed_forward_capture", "dropout": 0.1},
    {"dtype": "bf16", "control": "fallback_after_a_failure_on_one_rank", "dropout": 0.1},
    {"dtype": "bf16", "control": "fallback_after_a_failure_on_one_rank", "holds": "layer"},
]


FULL = FULL_RECOMPUTE | {"recompute_num_layers": 2}
# FP8 in graphs of the model
QUANTIZED: list[dict] = [
    {"dtype": "bf16", "fp8": recipe, "fp8_param": params, "microbatches": 2, **case}
    for recipe in ("delayed", "tensorwise")
    for params in (False, True)
    for case in (
        {"holds": "model", "microbatches": 3},
        {"holds": "model", "evaluates": "often", "dropout": 0.1},
        {"holds": "model", "sequences_later": [512, 1024]},
        {"holds": "model", "gradient_accumulation_fusion": True},
        {"holds": "model", "control": "captured_again"},
        {"holds": "model", "control": "failed_backward_capture"},
        {"holds": None, "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"},
        {"holds": "model", "mtp": 1},
        {"holds": "model", "recompute_modules": ["core_attn", "mlp"]},
        {"holds": "model", **FULL},
        {"holds": "model", **FULL, "recompute_method": "block"},
        {"holds": "model", "control": "failed_backward_capture", "recompute_modules": ["mlp"]},
    )
]
QUANTIZED.append({"dtype": "bf16", "fp8": "tensorwise", "first_last_layers_bf16": True})


# Whole-model graphs in layouts with several communicating groups
DENSE_MODELS: list[dict] = [
    {"dtype": dtype, "holds": "model", "dropout": 0.1, "microbatches": 2} for dtype in ("bf16", "fp32")
]
PADDED_MODELS: list[dict] = [
    {"dtype": dtype, "holds": "model", "experts": 4, "moe_expert_capacity_factor": 1.0, "microbatches": 2}
    for dtype in ("bf16", "fp32")
]


def cases_of(layout: str) -> list[dict]:
    """Return the cases of one of ``LAYOUTS``."""
    return {
        "data parallel": [*MOE, *GROUPED, *MORE, *QUANTIZED],
        "TP2 with sequence parallelism": [*MOE, MORE[1], *DENSE_MODELS, *PADDED_MODELS],
        "EP2 with ETP2": [*MOE, *PADDED_MODELS],
        "EP of all": EXCHANGED,
        "EP2 with DP2": EXCHANGED,
        "EP2 with TP2": EXCHANGED,
        "EP2 with CP2": EXCHANGED[:3],
        "CP2 with TP2": [MORE[1], MORE[3], DENSE_MODELS[0]],  # TransformerEngine has no fp32 attention backend
    }[layout]


RUNS = [layout for layout in LAYOUTS if LAYOUTS[layout][2] <= max(GPUS, 1)]


@pytest.mark.parametrize(
    ("layout", "case"),
    [pytest.param(layout, case, id=f"{layout}: {name_of(case)}") for layout in RUNS for case in cases_of(layout)],
)
def test_graphs_are_bit_identical_to_eager(together, layout, case):
    options, extra, _ = LAYOUTS[layout]
    sizes = SIZES | extra
    result = together(sizes | case, [sizes | each for each in cases_of(layout)], *options)
    assert_as_eager(result)
    control = case.get("control", "")
    failed = "fail" in control and "evaluation" not in control
    whole = captures_model(case)
    assert result["graphs"] == (0 if failed or whole else case.get("layers", 4) + case.get("mtp", 0))
    if whole:
        assert result["replays"] == (
            0 if failed else 2 * (case.get("microbatches_later") or case.get("microbatches", 1))
        )
        assert bool(result["clipping_replays"]) != failed
    eager = "control" in case or case.get("fp8_param")
    layers = 0 if eager else case.get("layers", 4) + case.get("mtp", 0)
    assert result["evaluation_replays"] == replays_of_evaluations(SIZES | case, layers)


@pytest.mark.parametrize("holds", ["layer", "model"])
def test_dead_replay_changes_the_loss(together, holds):
    case = SIZES | {"dtype": "bf16", "control": "dead_replay", "holds": holds}
    assert_differs_from(together(case, [case]), 3)
