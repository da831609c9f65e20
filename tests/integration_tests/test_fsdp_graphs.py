"""Test that training with graphs under Megatron-FSDP is bit-identical to eager, on two CPU ranks.

Compare the loss and gradient norm of every step, and the optimizer's parameter shards after the last step. Each
negative control breaks one part of the capture.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import (
    assert_as_eager,
    assert_differs_from,
    assert_went_on_eagerly,
    captures_model,
    replays_of_evaluations,
)
from tests.support.trainings.models import FULL_RECOMPUTE

SIZES: dict[str, Any] = {"layers": 3, "warmup": 1, "steps": 5}
PARTS = ["attn", "moe_router", "moe_preprocess"]
SHORTER: dict[str, Any] = {"sequences_later": [16, 32], "steps": 6}  # the last step replays
PADDED: dict[str, Any] = {"experts": 4, "moe_expert_capacity_factor": 1.0}
SHARED: dict[str, Any] = {"experts": 4, "moe_shared_expert_intermediate_size": 64}
OFTEN: dict[str, Any] = {"evaluates": "often", "dropout": 0.1, "microbatches": 2}
FEWER: dict[str, Any] = {"microbatches": 4, "microbatches_later": 1, "evaluates": True, "dtype": "bf16"}
FP16: dict[str, Any] = {"dtype": "fp16", "dropout": 0.1, "microbatches": 2, "warmup": 3, "steps": 10}
FUSED: dict[str, Any] = {"gradient_accumulation_fusion": True}

MODEL: list[dict[str, Any]] = [
    {"dropout": 0.1, **FEWER},
    {"warmup": 0, "dropout": 0.1, "evaluates": True},
    {"dtype": "bf16", "microbatches": 2, "layers": 5},
    FP16,
    {"mtp": 1, **FEWER},
    {"mtp": 2, "warmup": 0, "dtype": "fp16", "tied": False, "steps": 10},
    {"mtp": 1, "mtp_detach_heads": True, "control": "captured_again_later"},
    {"mtp": 1, **SHORTER},
    {"control": "captured_again", "dropout": 0.1},
    {"control": "evaluation_eager_on_one_rank", "evaluates": "often", "microbatches": 2},
    {"multi_latent_attention": True, "dropout": 0.1},
    {"recompute_modules": ["core_attn"], "microbatches": 2, "evaluates": True},
    FULL_RECOMPUTE | {"recompute_num_layers": 2, "microbatches": 2, "evaluates": True},
    FULL_RECOMPUTE | {"recompute_method": "block", "recompute_num_layers": 3, "layers": 5, "evaluates": True},
    FULL_RECOMPUTE | PADDED | SHARED,
    FUSED | {"warmup": 0, "mtp": 1, "tied": False},
    FUSED | {"microbatches_later": 2, "average_in_collective": True},
    FUSED | {"warmup": 0, "experts": 4, "moe_use_grouped_tensor": True, "evaluates": True},
    FUSED | FP16 | {"dropout": 0.0, "recompute_modules": ["mlp"]},
    {"positions": "learned_absolute"},
    {"positions": "yarn", "dropout": 0.1, "microbatches": 2},
    {"positions": "mrope", "microbatches": 2, "evaluates": "often", "evaluated_sequence": 48},
    {"recompute_modules": ["core_attn", "mlp"]},
    PADDED | {"dropout": 0.1, "microbatches": 2},
    PADDED | SHARED | {"moe_shared_expert_overlap": True, "microbatches": 2},
    {"control": "beside_a_larger_model"},
]
# Calls without labels, which return logits
LOGITS: list[dict[str, Any]] = [
    {"loss_outside": True, **case}
    for case in (
        {"dropout": 0.1, "evaluates": True},
        {"holds": None, "dtype": "bf16", "microbatches": 2, "evaluates": "often"},
        {"holds": None, "mtp": 1, "dropout": 0.1, "evaluates": True},
        {"holds": None, "fp8": "delayed", "microbatches": 2},
    )
]
# Gradient clipping is also captured.
CLIPPED: list[dict[str, Any]] = [
    {"norm_on_device": True, **case}
    for case in (
        {"dtype": "bf16", "microbatches_later": 2, "evaluates": True},
        FP16,  # skipped steps clip nothing
        {"dtype": "bf16", "control": "captured_again"},
        {"dtype": "bf16", "control": "clipping_eager_on_one_rank"},
    )
]
LAYERS: list[dict[str, Any]] = [
    {"holds": "layer", "dtype": "bf16", "dropout": 0.1, "microbatches": 2, "layers": 5},
    {"holds": "layer", "warmup": 0, "dropout": 0.1},
    {"holds": "layer", "control": "captured_again_later", "dropout": 0.1, "microbatches": 2},
    {"holds": "layer", **SHORTER, "dropout": 0.1, "microbatches": 2},
    {"holds": "layer", "data_parallel_sharding_strategy": "optim"},
    {"holds": "layer", "data_parallel_sharding_strategy": "no_shard", "dtype": "bf16"},
    {"holds": "layer", "data_parallel_sharding_strategy": "optim_grads", "evaluates": True},
    {"model": "vision", "microbatches": 3, "dtype": "bf16", "dropout": 0.1},
    {"holds": "layer", "control": "captured_by_two_helpers", "dropout": 0.1, "evaluates": True},
]
MODULES: list[dict[str, Any]] = [
    {"modules": ["attn"], "dtype": "bf16", "dropout": 0.1, "microbatches": 2},
    {"modules": ["attn"], "dropout": 0.1, **SHORTER},
    {"modules": ["attn"], "positions": "mrope", "microbatches": 2, "dtype": "bf16"},
    {"modules": ["attn"], "multi_latent_attention": True, "dtype": "bf16", "microbatches": 2},
    {"modules": ["attn"], "warmup": 0, "microbatches": 2, "megatron_fsdp_max_pool_double_buffer": True, **FUSED},
    {"modules": ["mlp"], "dropout": 0.1},
    {"modules": ["attn", "mlp", "moe_router"], "experts": 4, "moe_layer_freq": [0, 1, 1], "dropout": 0.1},
    {"modules": ["moe_router"], **SHARED},
    {"modules": ["attn", "moe"], **PADDED},
    {"modules": PARTS, "experts": 4, "dtype": "bf16", **OFTEN},
    {"modules": PARTS, **SHARED, "moe_shared_expert_overlap": True, "dtype": "bf16", "evaluates": True},
]
# FP8 with a miniature TransformerEngine (tests/support/layers/small_transformer_engine.py)
QUANTIZED: list[dict[str, Any]] = [
    {"fp8": recipe, "microbatches": 2, **case}
    for recipe, case in (
        ("delayed", OFTEN),
        ("delayed", {"warmup": 0, "microbatches": 1, "microbatches_later": 3}),
        ("delayed", SHORTER),
        ("delayed", {"norm_on_device": True, "dtype": "bf16", "tp_only_amax_red": True}),
        ("delayed", {"mtp": 1, "evaluates": True, "recompute_modules": ["core_attn"]}),
        ("delayed", {"holds": "layer", "evaluates": True}),
        ("tensorwise", {"dropout": 0.1, "evaluates": True}),
        ("tensorwise", {"first_last_layers_bf16": True, "dropout": 0.1}),
    )
]
EQUAL = MODEL + LOGITS + CLIPPED + LAYERS + MODULES + QUANTIZED
# One case per mode, recomputation, FP8 and control
QUICK = [FP16, MODEL[0], MODEL[8], MODEL[12], MODEL[-1], LOGITS[1], CLIPPED[-1], LAYERS[0], MODULES[1], QUANTIZED[0]]

# Capture before the first step, with two kinds of layers in one double buffer
FIRST_PLACES: list[dict[str, Any]] = [
    {"warmup": 0, "megatron_fsdp_max_pool_double_buffer": True, "dropout": 0.1, **case}
    for case in (
        PADDED | {"moe_layer_freq": [1, 1, 0], "holds": "layer"},
        {"experts": 4, "moe_layer_freq": [0, 0, 1], "modules": ["mlp"], "microbatches": 2},
    )
]
SURVIVED: list[dict[str, Any]] = [
    {"control": "failed_forward_capture", "dropout": 0.1},
    {"control": "failed_backward_capture", "holds": "layer"},
    {"control": "fallback_after_a_failure_on_one_rank", "dropout": 0.1},
    {"control": "fallback_after_a_failure_on_one_rank", "holds": "model", **FULL_RECOMPUTE},
    {"control": "failed_backward_capture", "fp8": "delayed", "holds": "model", "microbatches": 2},
    {"control": "failed_backward_capture", "mtp": 1, "holds": "model", "warmup": 0},
]
# The last rank runs every second layer eagerly. Layers with experts have two groups of buckets. Next to dense layers,
# these may not fit the double buffer: megatron-core then prefetches more.
BESIDE_REPLAYS: list[dict[str, Any]] = [
    {"control": "late_hook_on_one_rank", **case}
    for case in (
        {"modules": PARTS, **SHARED},
        {"holds": "layer", "experts": 8, "moe_use_grouped_tensor": True, "microbatches": 2, "dtype": "bf16"},
        {"holds": "layer", **PADDED, "layers": 4, "moe_layer_freq": [0, 1, 0, 1]},
        {"holds": "layer", **PADDED, "data_parallel_sharding_strategy": "optim_grads"},
    )
]
BESIDE_REPLAYS += [
    {"control": "late_hook_on_one_rank_without_plans", "holds": "layer", "layers": 4, "dtype": "bf16"},
    {"control": "late_hook_on_one_rank_without_plans", "holds": "layer", **PADDED},
]
DEAD: list[dict[str, Any]] = [{"control": "dead_replay", "holds": most} for most in ("layer", "model")]


@pytest.fixture
def train(trained):
    """Return a function that trains a case."""
    return lambda case: trained(SIZES | case)


def replays_of_a_step(case):
    """Return the expected number of replays in the last step.

    For each micro-batch, every captured model or layer replays a forward and a backward graph.
    """
    pieces = 1 if captures_model(case) else case.get("layers", SIZES["layers"]) + case.get("mtp", 0)
    return 2 * pieces * (case.get("microbatches_later") or case.get("microbatches", 1))


@pytest.mark.parametrize("case", mostly_long(EQUAL, *QUICK))
def test_graphs_are_bit_identical_to_eager(train, case):
    result = train(case)
    assert_as_eager(result)
    of_layers = case.get("layers", SIZES["layers"]) + case.get("mtp", 0)
    assert result["graphs"] == (0 if captures_model(case) else of_layers)
    assert result["replays"] == replays_of_a_step(case)
    assert result["evaluation_replays"] == replays_of_evaluations(SIZES | case, of_layers)
    assert len(result["losses"]) == case.get("steps", SIZES["steps"])
    if case in CLIPPED:
        assert result["clipping_replays"] >= 2
    if case is FP16:  # the loss scale overflows before and after capture
        assert result["grad_norms"][0] < 0
        assert any(norm < 0 for norm in result["grad_norms"][3:])


def test_synchronizing_clipping_is_not_captured(train):
    assert train(MODEL[0])["clipping_replays"] == 0


def test_evaluation_does_not_change_training(train):
    plain = OFTEN | {"evaluates": False}
    evaluated, plain = train(OFTEN), train(plain)
    assert (evaluated["losses"], evaluated["grad_norms"]) == (plain["losses"], plain["grad_norms"])


def test_failed_capture_for_evaluation_falls_back_on_all_ranks(train):
    case = {"control": "failed_capture_for_evaluation", "evaluates": True, "holds": "model", "dropout": 0.1}
    result = train(case)
    assert_as_eager(result)
    assert (result["replays"], result["evaluation_replays"]) == (replays_of_a_step(case), [0])


def test_hook_outside_layers_on_one_rank_captures_layers_on_all(train):
    result = train({"control": "hook_on_one_rank", "holds": "model", "dropout": 0.1})
    assert_as_eager(result)
    assert (result["graphs"], result["replays"]) == (SIZES["layers"], 2 * SIZES["layers"])


@pytest.mark.parametrize("case", mostly_long(BESIDE_REPLAYS, BESIDE_REPLAYS[1]))
def test_eager_fallback_on_one_rank_keeps_collective_order(train, case):
    result = train(case)
    assert_as_eager(result)
    assert result["replays"] == replays_of_a_step(case)


@pytest.mark.parametrize("case", mostly_long(FIRST_PLACES, FIRST_PLACES[0]))
def test_capture_before_the_first_step_places_buckets(train, case):
    result = train(case)
    assert_as_eager(result)
    graphs = case["moe_layer_freq"].count(0) if "modules" in case else SIZES["layers"]
    assert (result["graphs"], result["replays"]) == (graphs, 2 * graphs * case.get("microbatches", 1))


@pytest.mark.parametrize("case", mostly_long(SURVIVED, SURVIVED[1], SURVIVED[3]))
def test_training_continues_eagerly_after_a_failed_capture(train, case):
    assert_went_on_eagerly(train(case))


@pytest.mark.parametrize("case", mostly_long(DEAD, DEAD[1]))
def test_dead_replay_changes_the_loss(train, case):
    assert_differs_from(train(case), SIZES["warmup"])


@pytest.mark.parametrize(
    ("control", "error"),
    mostly_long(
        [
            ("hooks_left", "has hooks, which would become part of the graph"),
            ("no_post_backward_sentinel", "forward_pre_hooks hook"),
            ("no_pre_backward_sentinel", "forward_hooks hook"),
        ],
        ("no_pre_backward_sentinel", "forward_hooks hook"),
    ),
)
def test_misplaced_hook_fails_the_capture(train, control, error):
    assert error in train({"control": control, "holds": "layer"})["error"]


def test_missing_fixed_buffers_name_the_flags(train):
    result = train({"fsdp_double_buffer": False})
    assert "--fsdp-double-buffer is required" in result["error"]
    assert "--fsdp-db-use-persist-buf-on-alloc-fail is required" in result["error"]


def test_sequence_length_change_between_parts_is_refused(train):
    result = train({"sequences_later": [16, 32], "experts": 4, "modules": PARTS})
    assert "was captured with hidden_states of (32, 2, 64)" in result["error"]
    assert "--seq-length, --micro-batch-size" in result["error"]


@pytest.mark.long
def test_fixed_buffers_do_not_move_when_memory_is_taken(train):
    assert_as_eager(train({"control": "taken_addresses", "holds": "layer"}))


def test_moved_parameter_is_named(compare_runs):
    # A parameter may have moved on one rank only: the first error ends all ranks.
    case = {"fsdp_double_buffer": False, "unchecked": True, "control": "taken_addresses"}
    (result,) = compare_runs([SIZES | case], "--stop-at-error")
    assert "ChangedSinceCaptureError" in result["error"]
    assert "decoder.layers." in result["error"]
    assert "--fsdp-double-buffer" in result["error"]
