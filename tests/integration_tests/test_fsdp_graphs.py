"""A model under Megatron-FSDP with a graph per layer trains bit for bit as it does eagerly, on two CPU ranks.

Loss and gradient norm of every step and every parameter shard that the optimizer owns are compared, over 7 steps with
capture after 3. The controls break one thing each, and must be noticed.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import Trained, assert_as_eager, assert_differs_from, assert_went_on_eagerly
from tests.support.trainings.evaluations import replays_of_evaluations
from tests.support.trainings.launch import name_of

SIZES: dict[str, Any] = {"layers": 3, "steps": 7}
DENSE: list[dict[str, Any]] = [
    {"dtype": dtype, "dropout": dropout, "microbatches": microbatches, "modules": modules}
    for modules, runs in (
        ([], (("fp32", 0.1, 2), ("bf16", 0.1, 1))),
        (["attn"], (("fp32", 0.1, 1), ("bf16", 0.1, 2))),
    )
    for dtype, dropout, microbatches in runs
]
SHORTER: dict[str, Any] = {"sequences_later": [16, 32], "steps": 8}  # the last is replayed
# Whole layers, all of them in one graph in the cases above.
LAYERS_PER_GRAPH: list[dict[str, Any]] = [
    {"layers": 5, "holds": most, **case}
    for most, case in (
        ("decoder", {"dtype": "bf16", "dropout": 0.1, "microbatches": 2}),
        ("layer", {"dtype": "bf16", "dropout": 0.1, "microbatches": 2}),
        ("decoder", {"dropout": 0.1, "mtp": 1}),
        ("layer", {"warmup": 0, "dropout": 0.1}),
    )
]
WHOLE_MODEL: list[dict[str, Any]] = [
    {"holds": "model", **case}
    for case in (
        {},
        {"dtype": "bf16", "microbatches": 2, "layers": 5},
        {"dtype": "bf16", "dropout": 0.1, "microbatches": 4, "microbatches_later": 1, "evaluates": True},
        {"warmup": 0, "dropout": 0.1, "evaluates": True},
        {"dtype": "bf16", "optimizer_graph": True, "microbatches": 2},
        {"control": "captured_again", "dropout": 0.1},
        {"dtype": "fp16", "dropout": 0.1},
        {"mtp": 1, "dtype": "bf16", "dropout": 0.1, "microbatches": 4, "microbatches_later": 1, "evaluates": True},
        {"mtp": 2, "warmup": 0, "dtype": "fp16", "tied": False, "steps": 10},
        {"mtp": 1, "config": ["mtp_detach_heads=True"], "control": "captured_again_later"},
        {"mtp": 1, **SHORTER},
    )
]


def _full(method: str, layers: int) -> dict[str, Any]:
    """The flags of full recomputation."""
    values = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
    return {"config": [f"{name}={value!r}" for name, value in values.items()]}


# What the backward graph of all layers, or of the model, computes again.
RECOMPUTED: list[dict[str, Any]] = [
    {"holds": "model", "microbatches": 2, "layers": 5, "evaluates_often": True, **_full("uniform", 2)},
    {"holds": None, "dtype": "bf16", "optimizer_graph": True, **_full("uniform", 1)},
    {"holds": "model", "experts": 4, "capacity": 1.0, "shared_experts": 64, **_full("uniform", 1)},
    {"layers": 5, "microbatches": 2, "evaluates": True, **_full("block", 3)},
    {"control": "captured_again", "microbatches": 1, "microbatches_later": 2, **_full("uniform", 2)},
    {"holds": "model", "recompute": ["core_attn"], "microbatches": 2, "evaluates": True},
]
# Beside graphs of the whole model, the norm of gradients and their clipping are one too.
CLIPPED: list[dict[str, Any]] = [
    {"holds": "model", "norm_on_device": True, **case}
    for case in (
        {"dropout": 0.1, "evaluates": True},
        {"dtype": "bf16", "microbatches": 1, "microbatches_later": 2},
        {"dtype": "fp16", "microbatches": 2, "steps": 10},  # skipped steps have no clipping
        {"control": "captured_again", "dtype": "bf16"},
        {"control": "clipping_eager_on_one_rank", "dtype": "bf16"},
    )
]
MOE: list[dict[str, Any]] = [
    {
        "dtype": dtype,
        "dropout": 0.1,
        "microbatches": microbatches,
        "experts": 4,
        "modules": ["attn", "moe_router", "moe_preprocess"],
    }
    for dtype, microbatches in (("fp32", 1), ("bf16", 2))
]
OTHERS: list[dict[str, Any]] = [
    {"experts": 4, "shared_experts": 64, "modules": ["moe_router"]},
    {"strategy": "optim"},
    {"strategy": "no_shard"},
    {"recompute": ["core_attn", "mlp"]},
    {"evaluates": True, "dropout": 0.1},
    {"mtp": 1, "dropout": 0.1, "microbatches": 2},
    {"experts": 4, "capacity": 1.0, "modules": ["attn", "moe"]},
    {"control": "captured_again", "dropout": 0.1},
    {"control": "captured_again_later", "dropout": 0.1, "holds": "layer", "microbatches": 2},
    {"control": "captured_by_two_helpers", "dropout": 0.1, "evaluates": True},
    {**SHORTER, "dropout": 0.1, "holds": "layer", "microbatches": 2},
    {**SHORTER, "dropout": 0.1, "modules": ["attn"]},
    {"microbatches": 1, "microbatches_later": 3, "dropout": 0.1},
    {"microbatches": 3, "microbatches_later": 2, "dropout": 0.1, "holds": "layer"},
    {"control": "beside_an_equal_model"},
    {"control": "beside_a_larger_model"},
]
# Evaluations before capture, right after it, and after each step, of trainings above and of others.
EVALUATED_AGAIN = [DENSE[0], MOE[-1]]
EVALUATED: list[dict[str, Any]] = [
    {"evaluates_often": True, **case}
    for case in (
        *EVALUATED_AGAIN,
        {"evaluated_sequence": 48, "positions": "mrope", "microbatches": 2},
        {"holds": None, "microbatches": 2},
        {"holds": "model", "microbatches": 2, "control": "evaluation_eager_on_one_rank"},
    )
]
# Flags that megatron-core's own per-layer graphs do not take, or that failed without graphs too.
FP16: list[dict[str, Any]] = [
    {"dtype": "fp16", "dropout": 0.1, "microbatches": 2, "steps": 10},
    {"dtype": "fp16", "modules": ["attn"], "steps": 10},
]
POSITIONS: list[dict[str, Any]] = [
    {"positions": "learned_absolute"},
    {"positions": "yarn", "dropout": 0.1, "microbatches": 2},
    {"positions": "mrope", "microbatches": 2},
    {"positions": "mrope", "microbatches": 2, "dtype": "bf16", "modules": ["attn"]},
]
LATENT: list[dict[str, Any]] = [
    {"latent_attention": True, "holds": "model", "dropout": 0.1},
    {"latent_attention": True, "dtype": "bf16", "modules": ["attn"], "microbatches": 2},
]
DENSE_PARTS: list[dict[str, Any]] = [
    {"modules": ["mlp"], "dropout": 0.1},
    {"modules": ["attn", "mlp"], "microbatches": 2},
    {"experts": 4, "moe_layer_freq": [0, 1, 1], "modules": ["attn", "mlp", "moe_router"], "dropout": 0.1},
]
OVERLAPPED: dict[str, Any] = {"experts": 4, "shared_experts": 64, "shared_overlap": True}
EXPERTS: list[dict[str, Any]] = [
    {**OVERLAPPED, "modules": ["attn", "moe_router", "moe_preprocess"], "microbatches": 2},
    {
        **OVERLAPPED,
        "modules": ["attn", "moe_router", "moe_preprocess"],
        "evaluates": True,
        "dtype": "bf16",
        "dropout": 0.1,
    },
    {**OVERLAPPED, "capacity": 1.0, "microbatches": 2},
    {"experts": 4, "capacity": 1.0, "dropout": 0.1, "microbatches": 2},
]
VISION: list[dict[str, Any]] = [
    {"vision": True, "microbatches": 3, "dtype": "bf16", "dropout": 0.1},
    {"vision": True, "microbatches": 2, "dtype": "bf16", "dropout": 0.1, "modules": ["attn"]},
    {"vision": True, "control": "captured_again"},
]
# FP8 with a TransformerEngine in miniature (tests/support/layers/small_transformer_engine.py).
QUANTIZED: list[dict[str, Any]] = [
    {"fp8": recipe, "holds": most, "microbatches": 2, **case}
    for recipe, most, case in (
        ("delayed", "model", {"evaluates_often": True, "dropout": 0.1}),
        ("delayed", "model", {"warmup": 0, "microbatches": 1, "microbatches_later": 3}),
        ("delayed", "model", {"microbatches": 3, **SHORTER}),
        ("delayed", "model", {"norm_on_device": True, "dtype": "bf16"}),
        ("delayed", "model", {"config": ["tp_only_amax_red=True"]}),
        ("delayed", "decoder", {"evaluates_often": True, "dropout": 0.1}),
        ("delayed", "decoder", {"warmup": 0, "microbatches": 3}),
        ("delayed", "model", {"mtp": 1, "evaluates": True, "dropout": 0.1}),
        ("delayed", "model", {"recompute": ["core_attn"]}),
        ("delayed", "layer", {"evaluates": True}),
        ("tensorwise", "model", {"dropout": 0.1, "evaluates": True}),
        ("tensorwise", "decoder", {"config": ["first_last_layers_bf16=True"], "dropout": 0.1}),
    )
]
# Gradients of weights are written where they are reduced (tests/support/layers/fused_gradients.py).
FUSED: list[dict[str, Any]] = [
    {"fused_wgrad": True, **case}
    for case in (
        {"warmup": 0, "microbatches": 2, "dropout": 0.1},
        {"warmup": 0, "holds": "model", "mtp": 1, "tied": False},
        {"warmup": 0, "modules": ["attn"], "max_pool": True, "microbatches": 2},
        {"warmup": 0, "experts": 4, "grouped_tensor": True, "evaluates": True},
        {"warmup": 0, "recompute": ["mlp"], "dtype": "fp16", "steps": 10},
        {"microbatches": 1, "microbatches_later": 2, "holds": "model", "averaged": True},
        {"control": "captured_again", "microbatches": 2},
    )
]
EQUAL = DENSE + LAYERS_PER_GRAPH + WHOLE_MODEL + CLIPPED + MOE + OTHERS + EVALUATED
EQUAL += RECOMPUTED + FP16 + POSITIONS + LATENT + DENSE_PARTS + EXPERTS + VISION + QUANTIZED + FUSED
# In `make test` too: what none of its sets of flags has (test_pairs.py), and each control.
QUICK: list[dict[str, Any]] = [
    *(DENSE[0], WHOLE_MODEL[0], CLIPPED[-1], RECOMPUTED[0], LATENT[0], VISION[-1], QUANTIZED[0], FUSED[0]),
    {"holds": "model", "dtype": "bf16", "dropout": 0.1, "microbatches": 4, "microbatches_later": 1}
    | {"evaluates": True},
    {"holds": "model", "control": "captured_again", "dropout": 0.1},
    {"control": "captured_by_two_helpers", "dropout": 0.1, "evaluates": True},
    {"control": "beside_a_larger_model"},
    {**SHORTER, "dropout": 0.1, "modules": ["attn"]},
    {"evaluates_often": True, "holds": "model", "microbatches": 2, "control": "evaluation_eager_on_one_rank"},
]

# Captures before any step: some layers have experts, or graphs, and all share a double buffer.
FIRST_PLACES: list[dict[str, Any]] = [
    {"warmup": 0, "max_pool": True, "experts": 4, "dropout": 0.1, **case}
    for case in (
        {"moe_layer_freq": [1, 1, 0], "holds": "layer", "capacity": 1.0},
        {"moe_layer_freq": [0, 0, 1], "modules": ["mlp"], "microbatches": 2},
    )
]
SURVIVED: list[dict[str, Any]] = [
    {"control": "failed_forward_capture", "dropout": 0.1},
    {"control": "failed_backward_capture", "holds": "layer"},
    {"control": "fallback_after_a_failure_on_one_rank", "dropout": 0.1},
    {"control": "fallback_after_a_failure_on_one_rank", "dropout": 0.1, "holds": "model"},
    {"control": "failed_backward_capture", "dropout": 0.1, "holds": "model", "microbatches": 2},
    {"control": "failed_forward_capture", "holds": "model", **_full("uniform", 2)},
    {"control": "fallback_after_a_failure_on_one_rank", "holds": "model", **_full("uniform", 2)},
    {"control": "failed_backward_capture", "fp8": "delayed", "holds": "model", "microbatches": 2},
    {"control": "failed_backward_capture", "mtp": 1, "holds": "model", "warmup": 0},
]
FAILED_EVALUATION: dict[str, Any] = {
    "control": "failed_capture_for_evaluation",
    "evaluates": True,
    "holds": "model",
    "dropout": 0.1,
}
OBJECTION: dict[str, Any] = {"control": "hook_on_one_rank", "holds": "model", "dropout": 0.1}
# Three pieces of layers are replayed together: the second layer is alone.
HOOKED: list[dict[str, Any]] = [
    {"control": "layer_hook_on_one_rank", "layers": 5, "dropout": 0.1},
]
# The last rank runs every second layer eagerly. Layers with experts have two groups of buckets. Beside layers without
# they may be outside of the double buffer: megatron-core then prefetches more.
BESIDE_REPLAYS: list[dict[str, Any]] = [
    {"control": "late_hook_on_one_rank", **case}
    for case in (
        {"experts": 4, "modules": ["attn", "moe_router", "moe_preprocess"], "shared_experts": 64},
        {"holds": "layer", "experts": 8, "grouped_tensor": True, "microbatches": 2, "dtype": "bf16"},
        {"holds": "layer", "experts": 4, "capacity": 1.0, "layers": 4, "moe_layer_freq": [0, 1, 0, 1]},
        {"holds": "layer", "microbatches": 2, "dropout": 0.1},
        {"holds": "layer", "experts": 4, "capacity": 1.0, "strategy": "optim_grads"},
    )
]
BESIDE_REPLAYS += [
    {"control": "late_hook_on_one_rank_without_plans", "holds": "layer", "layers": 4, "dtype": "bf16"},
    {"control": "late_hook_on_one_rank_without_plans", "holds": "layer", "experts": 4, "capacity": 1.0},
]
NOTICED = {
    "hooks_left": "has hooks, which would become part of the graph",
    "no_post_backward_sentinel": "forward_pre_hooks hook",
    "no_pre_backward_sentinel": "forward_hooks hook",
    "taken_addresses": "",
}


def noticed(control):
    """Where the control is one of layers that are captured each by itself."""
    return {"control": control, "holds": "layer"}


DEAD: list[dict[str, Any]] = [
    {"control": "dead_replay", "holds": "layer"},
    {"control": "dead_replay", "holds": "model"},
    {"control": "dead_replay", "vision": True},
]


@pytest.fixture(scope="session")
def results(compare_runs):
    """The result of each case, by its name."""
    on_one_rank = [FAILED_EVALUATION, OBJECTION, *HOOKED, *BESIDE_REPLAYS]
    cases = [*EQUAL, *FIRST_PLACES, *on_one_rank, *SURVIVED, *map(noticed, NOTICED), *DEAD]
    return Trained(cases, compare_runs, SIZES)


@pytest.mark.parametrize("case", mostly_long(EQUAL, *QUICK), ids=name_of)
def test_graphs_train_bit_for_bit_as_eager(results, case):
    result = results[name_of(case)]
    assert_as_eager(result)
    of_layers = case.get("layers", SIZES["layers"]) + case.get("mtp", 0)
    whole = case.get("holds", "decoder") in (None, "model")
    assert result["graphs"] == (0 if whole else of_layers)
    assert result["replays"] == replays_of_a_step(case)
    assert result["evaluation_replays"] == replays_of_evaluations(SIZES | case, 0 if case.get("vision") else of_layers)
    assert len(result["losses"]) == case.get("steps", SIZES["steps"])


@pytest.mark.parametrize("case", mostly_long(CLIPPED, CLIPPED[-1]), ids=name_of)
def test_the_clipping_of_gradients_is_replayed(results, case):
    assert results[name_of(case)]["clipping_replays"] >= 2


def test_clipping_is_not_captured_that_the_host_waits_for(results):
    assert results[name_of(WHOLE_MODEL[0])]["clipping_replays"] == 0


@pytest.mark.parametrize("case", mostly_long(EVALUATED_AGAIN, DENSE[0]), ids=name_of)
def test_evaluation_does_not_change_training(results, case):
    result, trained = results[name_of({"evaluates_often": True, **case})], results[name_of(case)]
    assert (result["losses"], result["grad_norms"]) == (trained["losses"], trained["grad_norms"])


def test_after_a_failed_capture_on_one_rank_evaluation_runs_eagerly_on_all(results):
    result = results[name_of(FAILED_EVALUATION)]
    assert_as_eager(result)
    assert result["replays"] == replays_of_a_step(FAILED_EVALUATION)
    assert result["evaluation_replays"] == [0]


def test_where_one_rank_cannot_capture_the_whole_model_all_capture_layers(results):
    result = results[name_of(OBJECTION)]
    assert_as_eager(result)
    assert result["graphs"] == SIZES["layers"]
    assert result["replays"] == 2  # all layers in one graph


@pytest.mark.parametrize("case", HOOKED, ids=name_of)
def test_where_one_rank_cannot_record_a_layer_with_others_no_rank_does(results, case):
    result = results[name_of(case)]
    assert_as_eager(result)
    assert result["graphs"] == case["layers"]
    assert result["replays"] == 2 * case["layers"] * case.get("microbatches", 1)


@pytest.mark.parametrize("case", mostly_long(BESIDE_REPLAYS, BESIDE_REPLAYS[1], BESIDE_REPLAYS[-2]), ids=name_of)
def test_a_rank_that_runs_layers_eagerly_launches_collectives_in_the_order_of_replays(results, case):
    result = results[name_of(case)]
    assert_as_eager(result)
    assert result["replays"] == replays_of_a_step(case)


@pytest.mark.parametrize("case", mostly_long(FIRST_PLACES, FIRST_PLACES[0]), ids=name_of)
def test_buckets_have_their_places_before_a_first_capture(results, case):
    result = results[name_of(case)]
    assert_as_eager(result)
    graphs = SIZES["layers"] if "capacity" in case else case["moe_layer_freq"].count(0)
    assert (result["graphs"], result["replays"]) == (graphs, 2 * graphs * case.get("microbatches", 1))


@pytest.mark.parametrize("case", mostly_long(FP16, FP16[0]), ids=name_of)
def test_a_loss_scale_that_is_too_great_skips_steps_before_and_after_capture(results, case):
    norms = results[name_of(case)]["grad_norms"]
    assert norms[0] < 0  # a skipped step, see training.Trace
    assert any(norm < 0 for norm in norms[3:])
    assert max(norms[3:]) > 0


def replays_of_a_step(case):
    """How often graphs of layers are replayed: one in forward and one in backward, for each piece of layers."""
    if case.get("holds", "decoder") in (None, "model"):
        return 2 * (case.get("microbatches_later") or case.get("microbatches", 1))
    pieces = layers = case.get("layers", SIZES["layers"])
    sharded = case.get("strategy", "optim_grads_params") == "optim_grads_params"
    if not case.get("modules") and sharded:
        pieces = layers if case.get("holds") == "layer" else 1
    if case.get("control") == "captured_by_two_helpers":
        pieces = layers  # neither has all layers of the decoder
    microbatches = case.get("microbatches_later") or case.get("microbatches", 1)
    return 2 * (pieces + case.get("mtp", 0)) * microbatches


@pytest.mark.parametrize("case", mostly_long(SURVIVED, SURVIVED[0], SURVIVED[3]), ids=name_of)
def test_training_goes_on_eagerly_after_a_failed_capture(results, case):
    result = results[name_of(case)]
    assert_went_on_eagerly(result)


@pytest.mark.parametrize("case", mostly_long(DEAD, DEAD[1]), ids=name_of)
def test_a_replay_that_does_nothing_changes_the_loss(results, case):
    assert_differs_from(results[name_of(case)], 3)


@pytest.mark.parametrize("control", [name for name in NOTICED if NOTICED[name]])
def test_a_hook_in_the_wrong_place_fails_the_capture(results, control):
    assert NOTICED[control] in results[name_of(noticed(control))]["error"]


def test_without_fixed_buffers_the_helper_names_the_missing_flags(compare_runs):
    (result,) = compare_runs([{"double_buffer": False}])
    assert "--fsdp-double-buffer is required" in result["error"]
    assert "--fsdp-db-use-persist-buf-on-alloc-fail is required" in result["error"]


def test_another_sequence_length_is_refused_where_eager_passes_would_leave_other_shapes_to_replays(compare_runs):
    case = {"sequences_later": [16, 32], "experts": 4, "modules": ["attn", "moe_router", "moe_preprocess"]}
    (result,) = compare_runs([case])
    assert "was captured with hidden_states of (32, 2, 64)" in result["error"]
    assert "--seq-length, --micro-batch-size" in result["error"]


def test_with_fixed_buffers_no_parameter_moves_when_memory_is_taken(results):
    assert results[name_of(noticed("taken_addresses"))]["differences"] == []
    assert not results[name_of(noticed("taken_addresses"))]["error"]


def test_without_fixed_buffers_and_without_the_check_a_moved_parameter_is_named(compare_runs):
    # A parameter may have moved on one rank only, so the first error ends all ranks.
    case = {"double_buffer": False, "unchecked": True, "control": "taken_addresses"}
    (result,) = compare_runs([case], "--stop-at-error")
    assert "ChangedSinceCaptureError" in result["error"]
    assert "decoder.layers." in result["error"]
    assert "--fsdp-double-buffer" in result["error"]
