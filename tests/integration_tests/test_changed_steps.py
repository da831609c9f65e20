"""Graphs are captured again where training changes: bit for bit as eagerly before, while it runs eagerly, and after.

Sequence lengths and micro-batch sizes without pipeline stages; numbers of micro-batches with two stages, under
Megatron-FSDP and under DistributedDataParallel; and a ramp-up of the batch size in Megatron's own training loop.
"""

from typing import Any

import pytest

from megatron.core.transformer._cuda_graphs.te.changed_shapes import STEPS
from tests.support.pretraining.pretrain import numbers, pretrain
from tests.support.sample import mostly_long
from tests.support.trainings.compared import Trained, assert_as_eager
from tests.support.trainings.launch import name_of

CAPTURED_AFTER = 3
# Ranks compare shapes every STEPS steps from a capture on, and capture a step later. A change a step after a capture is
# found by the second comparison.
CAPTURED_AGAIN_AFTER = 2 * STEPS + 1
TURN = CAPTURED_AGAIN_AFTER + 2  # steps of one length
SIZES: dict[str, Any] = {"layers": 2, "hidden": 32, "sequence": 16, "dropout": 0.1, "turn": TURN}
ONCE: dict[str, Any] = {"sequences_later": [24], "steps": CAPTURED_AFTER + 1 + TURN}
TWICE: dict[str, Any] = {"sequences_later": [24, 32], "steps": CAPTURED_AFTER + 1 + 2 * TURN}
GROWING: list[dict[str, Any]] = [
    TWICE | {"microbatches": 2},
    ONCE | {"holds": "layer", "dtype": "bf16", "evaluates": True},
    ONCE | {"holds": "model", "dtype": "bf16", "optimizer_graph": True},
    ONCE | {"modules": ["attn"], "micro_batches_later": [1]},
    ONCE | {"fsdp": False, "microbatches": 2},
]
FAILED: list[dict[str, Any]] = [
    {"control": "failed_recaptures", "sequences_later": [24, 16], "steps": TWICE["steps"], **case}
    for case in ({"holds": None}, {"holds": "layer", "evaluates": True}, {"fsdp": False})
]
NOT_CAPTURED_AGAIN: list[dict[str, Any]] = [
    ONCE | {"max_captures": 1},
    ONCE | {"sequences_later": [24, 32], "turn": 1},
    ONCE | {"later_on_one_rank": True, "fsdp": False},
    # Collectives of replays on one rank and of eager passes on the other come in the same order.
    ONCE | {"later_on_one_rank": True, "microbatches": 2},
    ONCE | {"later_on_one_rank": True, "mtp": 1},  # a unit outside of the graph of the layers
    # Units with two buckets.
    *(
        ONCE | {"later_on_one_rank": True, "experts": 4, "capacity": 1.0, "holds": most}
        for most in ("decoder", "model")
    ),
    ONCE | {"later_on_one_rank": True, "holds": "layer", "evaluates": True},
    ONCE | {"later_on_one_rank": True, "holds": None, "evaluates": True},
    ONCE | {"later_on_one_rank": True, "modules": ["attn"], "dtype": "bf16"},
]
INTERLEAVED: list[dict[str, Any]] = [
    {"passes": 2, "steps": 6, **case}
    for case in ({"holds": None}, {"holds": "layer"}, {"holds": "model"}, {"fsdp": False})
]
WAITING: list[dict[str, Any]] = [
    {"holds": most, "steps": CAPTURED_AFTER + STEPS + 2, "control": "eager_on_last_rank"}
    for most in ("model", "decoder", "layer")
]
MASKED: list[dict[str, Any]] = [
    {"masked_step": 4, "microbatches": 2, "steps": 7, "evaluates": True, **case}
    for case in ({"holds": "model"}, {}, {"holds": "layer"}, {"modules": ["attn"]}, {"fsdp": False})
]
PIPELINE: dict[str, Any] = {"layers": 4, "hidden": 32, "steps": 7, "dropout": 0.1, "tied": False}
MICROBATCHES: list[dict[str, Any]] = [
    {"microbatches": before, "microbatches_later": after, **case}
    for before, after, case in (
        (2, 4, {}),
        (4, 2, {"modules": ["attn"], "evaluates": True}),
        (2, 4, {"virtual": 2, "dtype": "bf16"}),
        (4, 2, {"virtual": 2}),
        (2, 4, {"holds": None, "evaluates": True}),
        (4, 2, {"holds": None, "virtual": 2}),
        (1, 3, {"fsdp": False}),
        (2, 4, {"fsdp": False, "virtual": 2}),
    )
]
WITHOUT_CAPTURES: list[dict[str, Any]] = [
    {"microbatches": 2, "microbatches_later": 4, "max_captures": 1},
    {"microbatches": 2, "microbatches_later": 4, "max_captures": 1, "holds": None},
    {"microbatches": 2, "microbatches_later": 4, "max_captures": 1, "fsdp": False, "virtual": 2},
]
MASKED_IN_PIPELINE: list[dict[str, Any]] = [
    {"masked_step": 4, "microbatches": 4, "holds": most, "virtual": 2} for most in (None, "layer")
]
OTHER_LENGTHS: list[dict[str, Any]] = [
    {"holds": None, "microbatches": 4, "sequences_later": [24, 32], "turn": 2, "steps": 9, **case}
    for case in ({}, {"virtual": 2})
]


@pytest.fixture(scope="module")
def data_parallel(compare_runs):
    return Trained(GROWING + FAILED + NOT_CAPTURED_AGAIN + INTERLEAVED + MASKED + WAITING, compare_runs, SIZES)


@pytest.fixture(scope="module")
def pipeline(compare_runs):
    cases = MICROBATCHES + WITHOUT_CAPTURES + MASKED_IN_PIPELINE + OTHER_LENGTHS
    return Trained(cases, compare_runs, PIPELINE, "--pp", "2")


def steps_of_replays(result):
    return [step for step, replays in enumerate(result["step_replays"]) if replays]


@pytest.mark.parametrize("case", mostly_long(GROWING, GROWING[1]), ids=name_of)
def test_graphs_are_captured_for_each_sequence_length(data_parallel, case):
    result = data_parallel[name_of(case)]
    assert_as_eager(result)
    replayed = [CAPTURED_AFTER]  # the only step of the length at capture
    captured = CAPTURED_AFTER
    for turn in range(len(case["sequences_later"])):
        captured += CAPTURED_AGAIN_AFTER
        replayed += range(captured, CAPTURED_AFTER + 1 + (turn + 1) * TURN)
    assert steps_of_replays(result) == replayed


@pytest.mark.parametrize("case", mostly_long(FAILED, FAILED[0]), ids=name_of)
def test_after_a_failed_recapture_the_former_shape_has_graphs(data_parallel, case):
    result = data_parallel[name_of(case)]
    assert_as_eager(result)
    assert steps_of_replays(result) == [CAPTURED_AFTER, *range(CAPTURED_AFTER + 1 + TURN, case["steps"])]


@pytest.mark.parametrize("case", mostly_long(NOT_CAPTURED_AGAIN, NOT_CAPTURED_AGAIN[3]), ids=name_of)
def test_without_a_lasting_change_on_all_ranks_or_a_capture_left_graphs_are_kept(data_parallel, case):
    result = data_parallel[name_of(case)]
    assert_as_eager(result)
    unchanged = case.get("later_on_one_rank")  # the first rank, whose replays these are
    assert steps_of_replays(result) == list(range(CAPTURED_AFTER, case["steps"] if unchanged else CAPTURED_AFTER + 1))


@pytest.mark.parametrize("case", mostly_long(INTERLEAVED, INTERLEAVED[0]), ids=name_of)
def test_nothing_is_captured_where_two_forward_passes_come_before_their_backward_passes(data_parallel, case):
    result = data_parallel[name_of(case)]
    assert_as_eager(result)
    assert result["graphs"] == 0
    assert steps_of_replays(result) == []


def assert_all_steps_replay(result):
    assert_as_eager(result)
    assert steps_of_replays(result) == list(range(CAPTURED_AFTER, len(result["losses"])))
    assert len(set(result["step_replays"][CAPTURED_AFTER:])) == 1


@pytest.mark.parametrize("case", mostly_long(MASKED, MASKED[0]), ids=name_of)
def test_steps_replay_with_an_attention_mask_and_without(data_parallel, case):
    assert_all_steps_replay(data_parallel[name_of(case)])


@pytest.mark.parametrize("case", mostly_long(WAITING, WAITING[0]), ids=name_of)
def test_ranks_that_wait_for_an_eager_one_log_why(data_parallel, case):
    result = data_parallel[name_of(case)]
    assert_as_eager(result)
    assert steps_of_replays(result) == list(range(CAPTURED_AFTER, case["steps"]))  # of the first rank


@pytest.mark.parametrize("case", mostly_long(MASKED_IN_PIPELINE), ids=name_of)
def test_chunks_replay_with_an_attention_mask_and_without(pipeline, case):
    assert_all_steps_replay(pipeline[name_of(case)])


@pytest.mark.parametrize("case", mostly_long(MICROBATCHES, MICROBATCHES[0]), ids=name_of)
def test_graphs_are_captured_for_each_number_of_micro_batches(pipeline, case):
    result = pipeline[name_of(case)]
    assert_as_eager(result)
    passes = 2 * PIPELINE["layers"] // 2  # of a stage, forward and backward
    if "holds" in case:
        passes = 2 * case.get("virtual", 1)
    after = [passes * case["microbatches_later"]] * (PIPELINE["steps"] - CAPTURED_AFTER - 1)
    assert result["step_replays"] == [0] * CAPTURED_AFTER + [passes * case["microbatches"], *after]


@pytest.mark.parametrize("case", mostly_long(WITHOUT_CAPTURES, WITHOUT_CAPTURES[0]), ids=name_of)
def test_without_a_capture_left_another_number_of_micro_batches_runs_eagerly(pipeline, case):
    result = pipeline[name_of(case)]
    assert_as_eager(result)
    assert steps_of_replays(result) == [CAPTURED_AFTER]
    assert result["graphs"] == 0


def test_megatrons_loop_captures_again_where_the_batch_grows(tmp_path):
    flags = (
        "--train-iters 9 --pipeline-model-parallel-size 2 --num-layers 4 --untie-embeddings-and-output-weights "
        "--step-batch-size-schedule 0:4,768:8"  # two micro-batches, four from step 7 on, after 768 tokens
    )
    eager, graphed = (pretrain(tmp_path / str(graphs), flags, graphs=graphs) for graphs in (False, True))
    assert numbers(graphed) == numbers(eager)
    assert [step["graphs"] for step in graphed] == [0] * 3 + [2] * 3 + [4] * 3


@pytest.mark.parametrize("case", mostly_long(OTHER_LENGTHS, OTHER_LENGTHS[1]), ids=name_of)
def test_whole_chunks_of_a_pipeline_run_eagerly_with_another_sequence_length(pipeline, case):
    result = pipeline[name_of(case)]
    assert_as_eager(result)
    assert steps_of_replays(result) == [3, 6, 7]
