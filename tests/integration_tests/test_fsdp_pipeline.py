"""Test that graphs of chunks or layers in Megatron-FSDP pipeline stages are bit-identical to eager.

Two stages with one chunk (1F1B) or several interleaved chunks each, on two CPU ranks, or on four with two data-parallel
or tensor-parallel ranks per stage.
"""

from typing import Any

import pytest

from tests.support.pretraining.pretrain import pretrain
from tests.support.sample import mostly_long
from tests.support.trainings.compared import (
    assert_as_eager,
    assert_differs_from,
    assert_went_on_eagerly,
    replays_of_evaluations,
)
from tests.support.trainings.models import FULL_RECOMPUTE

SIZES: dict[str, Any] = {"layers": 4, "steps": 6, "microbatches": 4, "tied": False}
# Options of compare_runs.py, and the number of ranks
LAYOUTS: dict[str, tuple[tuple[str, ...], int]] = {
    "PP2": (("--pp", "2"), 2),
    "PP2 DP2": (("--pp", "2"), 4),
    "PP2 TP2": (("--pp", "2", "--tp", "2"), 4),
    "PP2 HSDP": (("--pp", "2", "--instances", "2"), 4),
}
MOE: dict[str, Any] = {"experts": 4, "modules": ["attn", "moe_router", "moe_preprocess"], "dropout": 0.1}
LAYERS: list[tuple[str, dict[str, Any]]] = [
    (layout, {"holds": "layer"} | case)
    for layout, case in (
        ("PP2", {"dtype": "bf16", "dropout": 0.1, "modules": ["attn"], "evaluates": "often", "warmup": 0}),
        ("PP2", {"dropout": 0.1, "tied": True, "evaluates": True, "positions": "mrope"}),
        ("PP2", MOE | {"evaluates": "often"}),
        # Three layers per chunk exceed the double buffer.
        (
            "PP2",
            {"virtual": 2, "layers": 12, "dtype": "bf16", "dropout": 0.1, "microbatches": 6, "evaluates": True},
        ),
        ("PP2", {"virtual": 2, "dropout": 0.1, "modules": ["attn"], "evaluates": "often"}),
        ("PP2", {"virtual": 4, "layers": 8, "steps": 8, "dropout": 0.1, "control": "captured_again_later"}),
        ("PP2 DP2", {"dtype": "bf16", "modules": ["attn"], "evaluates": True}),
        ("PP2 DP2", MOE),
        ("PP2 DP2", {"virtual": 2, "layers": 8, "dtype": "bf16", "dropout": 0.1}),
        ("PP2 TP2", {"dtype": "bf16", "dropout": 0.1, "evaluates": True}),
        ("PP2 TP2", {"virtual": 2, "dropout": 0.1, "modules": ["attn"]}),
    )
]
CHUNK: dict[str, Any] = {"holds": None}
PADDED: dict[str, Any] = {"experts": 4, "moe_expert_capacity_factor": 1.0}
PREDICTING: dict[str, Any] = {"mtp": 1}  # the last stage also holds the embedding
RECOMPUTED: dict[str, Any] = FULL_RECOMPUTE | {"recompute_num_layers": 2}
EAGER_MICRO_BATCH: dict[str, Any] = {"control": "eager_micro_batch_on_one_rank"}
HSDP: dict[str, Any] = {"num_distributed_optimizer_instances": 2, "tied": True, **PREDICTING}
CHUNKS: list[tuple[str, dict[str, Any]]] = [
    (layout, CHUNK | case)
    for layout, case in (
        ("PP2", {"dtype": "bf16", "dropout": 0.1, "evaluates": "often", "norm_on_device": True}),
        # Three layers per chunk exceed the double buffer.
        ("PP2", {"virtual": 2, "layers": 12, "dtype": "bf16", "dropout": 0.1, "microbatches": 6, "evaluates": True}),
        ("PP2", {"dtype": "fp16", "holds": "model"}),
        ("PP2", {"loss_outside": True, "dropout": 0.1, "evaluates": True}),
        ("PP2", {"virtual": 2, "dropout": 0.1, "evaluates": "often", "evaluated_sequence": 48, **PADDED}),
        ("PP2", {"dtype": "bf16", "experts": 4, "moe_use_grouped_tensor": True, "virtual": 2}),
        ("PP2", {"dtype": "bf16", "multi_latent_attention": True}),
        ("PP2", {"virtual": 2, "layers": 12, "microbatches": 6, **RECOMPUTED}),
        ("PP2", {"virtual": 4, "layers": 8, "steps": 8, "dropout": 0.1, "control": "captured_again_later"}),
        ("PP2", {"fp8": "delayed", "virtual": 2, "dropout": 0.1, "evaluates": True}),
        ("PP2", {"dtype": "bf16", "dropout": 0.1, "tied": True, "evaluates": True, "norm_on_device": True}),
        ("PP2", {"dtype": "bf16", "dropout": 0.1, "evaluates": "often", "positions": "mrope", **PREDICTING}),
        ("PP2", {"virtual": 2, "tied": True, "dropout": 0.1, "mtp": 2}),
        ("PP2", {"fp8": "delayed", "virtual": 2, **PREDICTING}),
        ("PP2", {**RECOMPUTED, "recompute_num_layers": 1, **PADDED, **PREDICTING}),
        ("PP2", {"pattern": "M*|-M/*M", "tied": True, "dropout": 0.1, "evaluates": True}),
        ("PP2 DP2", {"dtype": "bf16", "dropout": 0.1, "evaluates": "often", "norm_on_device": True, "steps": 8}),
        # Replays on one rank and an eager pass on the other must launch collectives in the same order.
        ("PP2 DP2", {"virtual": 2, "layers": 8, "dtype": "bf16", **EAGER_MICRO_BATCH}),
        ("PP2 DP2", {"dropout": 0.1, **PADDED}),
        ("PP2 DP2", {"fp8": "delayed", **EAGER_MICRO_BATCH}),
        ("PP2 DP2", {"tied": True, **EAGER_MICRO_BATCH, **PREDICTING}),
        ("PP2 DP2", {"dropout": 0.1, "evaluates": "often", "fp8": "delayed", **PREDICTING}),
        ("PP2 DP2", {"dropout": 0.1, "evaluates": "often", "control": "evaluation_eager_on_one_rank"}),
        ("PP2 DP2", {"virtual": 2, "layers": 8, "tied": True, "dtype": "bf16"}),
        ("PP2 TP2", {"dtype": "bf16", "dropout": 0.1, "evaluates": True}),
        ("PP2 TP2", {"virtual": 2, "dropout": 0.1, "loss_outside": True, "sequence_parallel": True}),
        ("PP2 HSDP", HSDP | {"dropout": 0.1}),
        ("PP2 HSDP", HSDP | {"outer_dp_sharding_strategy": "optim"}),
    )
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("PP2", CHUNK | {"control": "refused_on_one_stage"}),
    ("PP2 DP2", CHUNK | {"control": "refused_on_one_stage", "virtual": 2, "dropout": 0.1}),
]
FAILURE: dict[str, Any] = {"dropout": 0.1, "control": "fallback_after_a_failure_on_one_rank"}
FAILURES: list[tuple[str, dict[str, Any]]] = [
    ("PP2", FAILURE | {"holds": "layer"}),
    ("PP2 DP2", FAILURE | CHUNK),  # then attempts graphs of layers
    ("PP2 DP2", FAILURE | {"virtual": 2, "holds": "model"}),
]
FAILED_EVALUATION: list[dict[str, Any]] = [
    CHUNK | {"evaluates": True, "dropout": 0.1, "control": "failed_capture_for_evaluation"},
    CHUNK | {"evaluates": True, "virtual": 2, "control": "failed_capture_for_evaluation"},
]
DEAD: list[dict[str, Any]] = [{"virtual": 2, "control": "dead_replay", "holds": most} for most in ("layer", None)]


@pytest.fixture
def train(trained):
    """Return a function that trains a case in a layout."""

    def run(layout, case):
        options, ranks = LAYOUTS[layout]
        return trained(SIZES | case, *options, ranks=ranks)

    return run


def assert_layers_replayed(case, result):
    assert_as_eager(result)
    case = SIZES | case
    slots = case["layers"] // 2 * case["microbatches"]  # of one stage
    assert (result["graphs"], result["replays"]) == (slots, 2 * slots)
    assert result["evaluation_replays"] == replays_of_evaluations(case | {"holds": "layer"}, 0)


@pytest.mark.parametrize(("layout", "case"), mostly_long(LAYERS, LAYERS[1]))
def test_layer_graphs_are_bit_identical_to_eager(train, layout, case):
    assert_layers_replayed(case, train(layout, case))


@pytest.mark.parametrize(("layout", "case"), mostly_long(CHUNKS, CHUNKS[0]))
def test_chunk_graphs_are_bit_identical_to_eager(train, layout, case):
    result = train(layout, case)
    assert_as_eager(result)
    case = SIZES | case
    chunks = case.get("virtual", 1)
    replays = 2 * chunks * case["microbatches"]  # of the first rank, which never falls back
    assert result["graphs"] == 0
    assert result["step_replays"][-2:] == [replays, replays]
    assert bool(result["clipping_replays"]) == (chunks == 1 and case.get("norm_on_device", False))
    assert result["evaluation_replays"] == [chunks * count for count in replays_of_evaluations(case, 1)]


@pytest.mark.long
@pytest.mark.parametrize(("layout", "case"), REFUSED)
def test_one_stage_without_model_graph_captures_layers_on_all(train, layout, case):
    assert_layers_replayed(case, train(layout, case))


@pytest.mark.parametrize(("layout", "case"), mostly_long(FAILURES, FAILURES[2]))
def test_failure_on_one_rank_makes_all_stages_eager(train, layout, case):
    assert_went_on_eagerly(train(layout, case))


@pytest.mark.long
@pytest.mark.parametrize("case", FAILED_EVALUATION)
def test_failed_evaluation_capture_affects_only_its_stage(train, case):
    result = train("PP2", case)
    assert_as_eager(result)
    replays = case.get("virtual", 1) * SIZES["microbatches"]
    assert result["replays"] == 2 * replays
    assert result["evaluation_replays"][-1] == replays  # on the first stage


@pytest.mark.long
@pytest.mark.parametrize("case", DEAD)
def test_dead_replay_changes_the_loss(train, case):
    assert_differs_from(train("PP2", case), 3)


# The reference is megatron-core's own reduction of the embedding's gradients, without Megatron-FSDP.
@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"mtp": 1},
        {"mtp": 1, "tied": False},
        {"data_parallel_sharding_strategy": "optim"},
        {"data_parallel_sharding_strategy": "no_shard"},
    ],
)
def test_embedding_of_two_stages_trains_as_without_megatron_fsdp(train, case):
    case = {"holds": "layer", "tied": True, **case}
    sharded = train("PP2 DP2", case)
    case.pop("data_parallel_sharding_strategy", None)
    whole = train("PP2 DP2", case | {"wrapper": "ddp"})
    assert_as_eager(sharded)
    assert sharded["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    assert sharded["grad_norms"] == pytest.approx(whole["grad_norms"], rel=1e-5)


STAGES = """
    --pipeline-model-parallel-size 2 --num-layers 4 --untie-embeddings-and-output-weights --train-iters 2
    --attention-dropout 0 --hidden-dropout 0 --overlap-grad-reduce --overlap-param-gather
"""


@pytest.fixture(scope="module")
def sharded_stages(tmp_path_factory):
    """Return each step's metrics from two pipeline stages that reduce gradients in every backward pass."""
    return pretrain(tmp_path_factory.mktemp("stages") / "run", STAGES, graphs=False, ranks=4)


# These flags reduce all or some gradients in the last micro-batch only.
@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        "--num-distributed-optimizer-instances 2",
        "--data-parallel-sharding-strategy optim --no-gradient-reduce-div-fusion",
        "--data-parallel-sharding-strategy no_shard",
    ],
)
def test_every_stage_reduces_gradients_over_all_ranks(sharded_stages, tmp_path, flags):
    steps = pretrain(tmp_path / "run", f"{STAGES} {flags}", graphs=False, ranks=4)
    for step, expected in zip(steps, sharded_stages, strict=True):
        # bf16 rounding depends on summation order; a missing rank would change gradients by a quarter.
        assert step["loss"] == pytest.approx(expected["loss"], rel=2**-12)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2**-7)
