"""Pipeline stages under Megatron-FSDP train bit for bit as eagerly, with graphs for each micro-batch.

These hold whole chunks of the model, or a layer each. Two stages, each with one chunk (1F1B) or with several that
interleave, on two CPU ranks or, with two data-parallel or tensor-parallel ranks a stage, on four.
"""

from itertools import product
from typing import Any

import pytest

from tests.support.pretraining.pretrain import pretrain
from tests.support.sample import mostly_long
from tests.support.trainings.compared import Trained, assert_as_eager, assert_differs_from, assert_went_on_eagerly
from tests.support.trainings.evaluations import replays_of_evaluations
from tests.support.trainings.launch import name_of

SIZES: dict[str, Any] = {"layers": 4, "steps": 6, "microbatches": 4, "tied": False}
MOE: dict[str, Any] = {"experts": 4, "modules": ["attn", "moe_router", "moe_preprocess"]}
LAYERS: dict[str, Any] = {"holds": "decoder"}
FAILURE: dict[str, Any] = {"dropout": 0.1, "control": "fallback_after_a_failure_on_one_rank"}
ONE_RANK: list[dict[str, Any]] = [
    {},
    {"dtype": "bf16", "dropout": 0.1, "modules": ["attn"], "evaluates_often": True, "warmup": 0},
    {"evaluates": True, "positions": "mrope"},
    {"dropout": 0.1, "tied": True, "evaluates": True},
    {"dropout": 0.1, **MOE, "evaluates_often": True},
    {"virtual": 2},
    # Three layers in a chunk: more than the double buffer has places.
    {"virtual": 2, "layers": 12, "dtype": "bf16", "dropout": 0.1, "microbatches": 6, "evaluates": True},
    {"virtual": 2, "dtype": "bf16", "modules": ["attn"]},
    {"virtual": 2, "dropout": 0.1, "modules": ["attn"], "evaluates_often": True},
    {"virtual": 2, "dropout": 0.1, **MOE},
    {"virtual": 4, "layers": 8, "steps": 8, "dropout": 0.1, "control": "captured_again_later"},
]
TWO_RANKS: list[dict[str, Any]] = [
    {"dtype": "bf16", "modules": ["attn"], "evaluates": True},
    {"dropout": 0.1, **MOE},
    {"virtual": 2, "layers": 8, "dtype": "bf16", "dropout": 0.1},
]
# A graph of each chunk, with embedding, output layer and losses, in each direction and for each micro-batch.
CHUNK: dict[str, Any] = {"holds": None}
PADDED: dict[str, Any] = {"experts": 4, "capacity": 1.0}
PREDICTING: dict[str, Any] = {"mtp": 1}  # with the embedding in the last stage too
RECOMPUTED: dict[str, Any] = {
    "config": ["recompute_granularity='full'", "recompute_method='uniform'", "recompute_num_layers=2"]
}
WHOLE: list[dict[str, Any]] = [
    CHUNK | case
    for case in (
        {"dtype": "bf16", "dropout": 0.1, "evaluates_often": True, "norm_on_device": True},
        # Three layers in a chunk: more than the double buffer has places.
        {"virtual": 2, "layers": 12, "dtype": "bf16", "dropout": 0.1, "microbatches": 6, "evaluates": True},
        {"dtype": "fp16", "holds": "model"},
        {"dropout": 0.1, "evaluates": True, **PADDED},
        {"virtual": 2, "dropout": 0.1, **PADDED},
        {"dtype": "bf16", "experts": 4, "grouped_tensor": True, "virtual": 2},
        {"dtype": "bf16", "latent_attention": True, "optimizer_graph": True},
        {"layers": 8, "dtype": "bf16", "evaluates": True, **RECOMPUTED},
        {"virtual": 2, "layers": 12, "microbatches": 6, **RECOMPUTED},
        {"virtual": 4, "layers": 8, "steps": 8, "dropout": 0.1, "control": "captured_again_later"},
        {"fp8": "delayed", "dropout": 0.1, "evaluates": True},
        {"fp8": "delayed", "virtual": 2, "dropout": 0.1},
        {"dtype": "bf16", "dropout": 0.1, "tied": True, "evaluates": True, "norm_on_device": True},
        {"dtype": "bf16", "dropout": 0.1, "evaluates_often": True, "positions": "mrope", **PREDICTING},
        {"virtual": 2, "tied": True, "dropout": 0.1, "mtp": 2},
        {"fp8": "delayed", "virtual": 2, **PREDICTING},
        {"config": [*RECOMPUTED["config"][:2], "recompute_num_layers=1"], **PADDED, **PREDICTING},
        {"pattern": "M*|-M/*M", "tied": True, "dropout": 0.1, "evaluates": True},
        {"virtual": 2, "dropout": 0.1, "evaluates_often": True, "evaluated_sequence": 48, **PADDED},
    )
]
WHOLE_OF_TWO_RANKS: list[dict[str, Any]] = [
    CHUNK | case
    for case in (
        {"dtype": "bf16", "dropout": 0.1, "evaluates_often": True, "norm_on_device": True, "steps": 8},
        {"virtual": 2, "layers": 8, "dtype": "bf16", "dropout": 0.1},
        # Collectives of replays on one rank and of an eager pass on the other come in the same order.
        {"dropout": 0.1, "control": "eager_micro_batch_on_one_rank"},
        {"virtual": 2, "layers": 8, "dtype": "bf16", "control": "eager_micro_batch_on_one_rank"},
        {"dropout": 0.1, **PADDED},
        {"fp8": "delayed", "control": "eager_micro_batch_on_one_rank"},
        {"tied": True, "control": "eager_micro_batch_on_one_rank", **PREDICTING},
        {"dropout": 0.1, "evaluates_often": True, "fp8": "delayed", **PREDICTING},
        {"dtype": "bf16", "dropout": 0.1, "evaluates_often": True, "control": "evaluation_eager_on_one_rank"},
        {"virtual": 2, "layers": 8, "tied": True, "dtype": "bf16"},
    )
]
WHOLE_OF_TWO_INSTANCES: list[dict[str, Any]] = [
    CHUNK | PREDICTING | {"instances": 2, "tied": True, **case} for case in ({"dropout": 0.1}, {"outer": "optim"})
]
WHOLE_TENSOR_PARALLEL: list[dict[str, Any]] = [
    CHUNK | case for case in ({"dtype": "bf16", "dropout": 0.1, "evaluates": True}, {"virtual": 2, "dropout": 0.1})
]
# Where one stage cannot be captured as a whole none is.
RANKS = ["one_rank", "two_ranks"]
REFUSED: list[dict[str, Any]] = [
    CHUNK | {"control": "refused_on_one_stage"},
    CHUNK | {"control": "refused_on_one_stage", "virtual": 2, "dropout": 0.1},
]
FAILURES: list[dict[str, Any]] = [
    FAILURE,
    FAILURE | {"virtual": 2},
    FAILURE | CHUNK,  # whose layers are then tried
    FAILURE | {"virtual": 2, "holds": "model"},
]
FAILED_EVALUATION: list[dict[str, Any]] = [
    CHUNK | {"evaluates": True, "dropout": 0.1, "control": "failed_capture_for_evaluation"},
    CHUNK | {"evaluates": True, "virtual": 2, "control": "failed_capture_for_evaluation"},
]
TENSOR_PARALLEL: list[dict[str, Any]] = [
    {"dtype": "bf16", "dropout": 0.1, "evaluates": True},
    {"virtual": 2, "dropout": 0.1, "modules": ["attn"]},
]
DEAD_REPLAYS: list[dict[str, Any]] = [
    {"virtual": 2, "control": "dead_replay", "holds": most} for most in ("decoder", None)
]


@pytest.fixture(scope="module")
def one_rank(compare_runs):
    """The result of each case with one data-parallel rank a stage, by its name."""
    return Trained(
        [*ONE_RANK, *WHOLE, *REFUSED, *FAILURES, *FAILED_EVALUATION, *DEAD_REPLAYS], compare_runs, SIZES, "--pp", "2"
    )


@pytest.fixture(scope="module")
def two_ranks(compare_runs):
    """The same with two data-parallel ranks a stage."""
    return Trained([*TWO_RANKS, *WHOLE_OF_TWO_RANKS, *REFUSED, *FAILURES], compare_runs, SIZES, "--pp", "2", ranks=4)


@pytest.fixture(scope="module")
def two_instances(compare_runs):
    """The same with two instances of one data-parallel rank a stage."""
    return Trained(WHOLE_OF_TWO_INSTANCES, compare_runs, SIZES, "--pp", "2", "--instances", "2", ranks=4)


@pytest.fixture(scope="module")
def tensor_parallel(compare_runs):
    """The same with two tensor-parallel ranks a stage."""
    return Trained(TENSOR_PARALLEL + WHOLE_TENSOR_PARALLEL, compare_runs, SIZES, "--tp", "2", "--pp", "2", ranks=4)


def assert_bit_equal(case, result):
    assert_as_eager(result)
    case = SIZES | case
    slots = case["layers"] // 2 * case["microbatches"]  # of the layers of a stage
    assert result["graphs"] == slots
    assert result["replays"] == 2 * slots
    assert result["evaluation_replays"] == replays_of_evaluations(case | LAYERS, case["layers"] // 2)


@pytest.mark.parametrize("case", mostly_long(ONE_RANK, ONE_RANK[1]), ids=name_of)
def test_graphs_train_bit_for_bit_as_eager(one_rank, case):
    assert_bit_equal(case, one_rank[name_of(case)])


def assert_whole_chunks_bit_equal(case, result):
    assert_as_eager(result)
    case = SIZES | case
    chunks = case.get("virtual", 1)
    assert result["graphs"] == 0  # of layers
    replays = 2 * chunks * case["microbatches"]  # of the first rank, which replays all
    assert result["step_replays"][-2:] == [replays, replays]
    assert bool(result["clipping_replays"]) == (chunks == 1 and case.get("norm_on_device", False))
    assert result["evaluation_replays"] == [chunks * replays for replays in replays_of_evaluations(case, 1)]


@pytest.mark.parametrize("case", mostly_long(WHOLE, WHOLE[0]), ids=name_of)
def test_graphs_of_whole_chunks_train_bit_for_bit_as_eager(one_rank, case):
    assert_whole_chunks_bit_equal(case, one_rank[name_of(case)])


@pytest.mark.parametrize("case", mostly_long(WHOLE_OF_TWO_RANKS, WHOLE_OF_TWO_RANKS[3]), ids=name_of)
def test_graphs_of_whole_chunks_train_bit_for_bit_as_eager_with_two_data_parallel_ranks(two_ranks, case):
    assert_whole_chunks_bit_equal(case, two_ranks[name_of(case)])


@pytest.mark.long
@pytest.mark.parametrize("case", WHOLE_TENSOR_PARALLEL, ids=name_of)
def test_graphs_of_whole_chunks_train_bit_for_bit_as_eager_with_two_tensor_parallel_ranks(tensor_parallel, case):
    assert_whole_chunks_bit_equal(case, tensor_parallel[name_of(case)])


@pytest.mark.long
@pytest.mark.parametrize("case", WHOLE_OF_TWO_INSTANCES, ids=name_of)
def test_graphs_of_whole_chunks_train_bit_for_bit_as_eager_with_hybrid_sharding(two_instances, case):
    assert_whole_chunks_bit_equal(case, two_instances[name_of(case)])


@pytest.mark.parametrize(("case", "ranks"), mostly_long(product(REFUSED, RANKS), (REFUSED[1], "two_ranks")))
def test_where_one_stage_cannot_be_captured_as_a_whole_layers_of_all_are(case, ranks, request):
    assert_bit_equal(case, request.getfixturevalue(ranks)[name_of(case)])


@pytest.mark.long
@pytest.mark.parametrize("case", TWO_RANKS, ids=name_of)
def test_graphs_train_bit_for_bit_as_eager_with_two_data_parallel_ranks(two_ranks, case):
    assert_bit_equal(case, two_ranks[name_of(case)])


@pytest.mark.long
@pytest.mark.parametrize("case", TENSOR_PARALLEL, ids=name_of)
def test_graphs_train_bit_for_bit_as_eager_with_two_tensor_parallel_ranks(tensor_parallel, case):
    assert_bit_equal(case, tensor_parallel[name_of(case)])


@pytest.mark.parametrize(("case", "ranks"), mostly_long(product(FAILURES, RANKS), (FAILURES[3], "two_ranks")))
def test_after_a_failure_on_one_rank_all_stages_go_on_without_graphs(case, ranks, request):
    result = request.getfixturevalue(ranks)[name_of(case)]
    assert_went_on_eagerly(result)


@pytest.mark.parametrize("case", mostly_long(FAILED_EVALUATION, FAILED_EVALUATION[1]), ids=name_of)
def test_a_stage_that_fails_to_capture_evaluation_evaluates_eagerly_beside_the_other(one_rank, case):
    result = one_rank[name_of(case)]
    assert_as_eager(result)
    chunks = case.get("virtual", 1)
    assert result["replays"] == 2 * chunks * SIZES["microbatches"]
    assert result["evaluation_replays"][-1] == chunks * SIZES["microbatches"]  # on the first stage


@pytest.mark.parametrize("case", DEAD_REPLAYS, ids=name_of)
def test_a_replay_that_does_nothing_changes_the_loss(one_rank, case):
    assert_differs_from(one_rank[name_of(case)], 3)


# megatron-core's own reduction of the embedding's gradients, without Megatron-FSDP, is what both are compared with.
SHARED_EMBEDDING: list[dict[str, Any]] = [
    {},
    {"mtp": 1},
    {"mtp": 1, "tied": False},
    {"strategy": "optim"},
    {"strategy": "no_shard"},
]


@pytest.mark.long
@pytest.mark.parametrize("case", SHARED_EMBEDDING, ids=name_of)
def test_an_embedding_in_two_stages_is_trained_as_without_megatron_fsdp(compare_runs, case):
    sharded, whole = (
        compare_runs([SIZES | LAYERS | {"tied": True, **case, "fsdp": fsdp}], "--pp", "2", ranks=4)[0]
        for fsdp in (True, False)
    )
    assert_as_eager(sharded)
    assert sharded["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    assert sharded["grad_norms"] == pytest.approx(whole["grad_norms"], rel=1e-5)


STAGES = """
    --pipeline-model-parallel-size 2 --num-layers 4 --untie-embeddings-and-output-weights --train-iters 2
    --attention-dropout 0 --hidden-dropout 0 --overlap-grad-reduce --overlap-param-gather
"""
# What reduces gradients, or some of them, in the last micro-batch of a step only.
REDUCED_LATE = [
    "--num-distributed-optimizer-instances 2",
    pytest.param("--data-parallel-sharding-strategy optim --no-gradient-reduce-div-fusion", marks=pytest.mark.long),
    pytest.param("--data-parallel-sharding-strategy no_shard", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def sharded_stages(tmp_path_factory):
    """The steps of two stages whose every backward pass reduces its gradients, over two ranks each."""
    return pretrain(tmp_path_factory.mktemp("stages") / "run", STAGES, graphs=False, ranks=4)


@pytest.mark.parametrize("flags", REDUCED_LATE)
def test_every_stage_reduces_its_gradients_over_all_ranks(sharded_stages, tmp_path, flags):
    steps = pretrain(tmp_path / "run", f"{STAGES} {flags}", graphs=False, ranks=4)
    for step, expected in zip(steps, sharded_stages, strict=True):
        # bf16 gradients are summed in another order; gradients of one rank instead of two differ by a quarter.
        assert step["loss"] == pytest.approx(expected["loss"], rel=2**-12)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2**-7)
