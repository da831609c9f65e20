"""Test that every step is bit-identical to eager if shapes, numbers of micro-batches or masks change."""

from typing import Any

import pytest

from tests.support.pretraining.pretrain import numbers, pretrain
from tests.support.sample import mostly_long
from tests.support.trainings.compared import assert_as_eager, captures_model

CAPTURED_AFTER = 3
SIZES: dict[str, Any] = {"layers": 2, "hidden": 32, "sequence": 16, "dropout": 0.1}
DDP: dict[str, Any] = {"wrapper": "ddp"}
LONGER: dict[str, Any] = {"sequences_later": [24, 32], "turn": 2, "steps": CAPTURED_AFTER + 5}
CAPTURED: list[dict[str, Any]] = [
    LONGER | {"control": "captured_for_each_shape", **case}
    for case in (
        {"microbatches": 2},
        {"holds": "layer", "dtype": "bf16", "evaluates": True},
        {"holds": "model", "dtype": "bf16"},
        {"modules": ["attn"], "micro_batches_later": [1]},
        DDP | {"microbatches": 2},
    )
]
ONE_RANK: dict[str, Any] = LONGER | {"later_on_one_rank": True}
EAGER: list[dict[str, Any]] = [
    LONGER,
    ONE_RANK | DDP,
    # Replays on one rank and eager passes on the other must launch collectives in the same order.
    ONE_RANK | {"microbatches": 2},
    ONE_RANK | {"mtp": 1},
    ONE_RANK | {"experts": 4, "moe_expert_capacity_factor": 1.0, "holds": "model"},  # two buckets per unit
    ONE_RANK | {"holds": "layer", "evaluates": True},
    ONE_RANK | {"modules": ["attn"], "dtype": "bf16"},
]
INTERLEAVED: list[dict[str, Any]] = [{"passes": 2, "steps": 6, **case} for case in ({"holds": None}, DDP)]
SEEN = {"masked_step": 2}
MASKED: list[dict[str, Any]] = [
    {"masked_step": 4, "microbatches": 2, "steps": 7, "evaluates": True, **case}
    for case in ({"holds": "model"}, SEEN, SEEN | {"holds": None}, {"modules": ["attn"]}, DDP)
]
PIPELINE: dict[str, Any] = {"layers": 4, "hidden": 32, "steps": 7, "dropout": 0.1, "tied": False}
MORE: dict[str, Any] = {"microbatches": 2, "microbatches_later": 4}
FEWER: dict[str, Any] = {"microbatches": 4, "microbatches_later": 2}
MICROBATCHES: list[dict[str, Any]] = [
    MORE | {"holds": "layer", "virtual": 2, "dtype": "bf16"},
    FEWER | {"modules": ["attn"], "evaluates": True},
    MORE | {"holds": None, "evaluates": True},
    FEWER | {"holds": None, "virtual": 2},
    MORE | DDP | {"virtual": 2},
]
NO_RECAPTURES: list[dict[str, Any]] = [
    MORE | {"control": "no_recaptures", **case} for case in ({"holds": None}, DDP | {"virtual": 2})
]
MASKED_IN_PIPELINE: list[dict[str, Any]] = [
    {"masked_step": step, "microbatches": 4, "holds": most, "virtual": 2} for most, step in ((None, 2), ("layer", 4))
]
OTHER_LENGTHS: dict[str, Any] = {"holds": None, "microbatches": 4, "sequences_later": [24, 32], "turn": 2, "steps": 9}


@pytest.fixture
def train(trained):
    """Return a function that trains a case on two data-parallel ranks."""
    return lambda case: trained(SIZES | case)


@pytest.fixture
def pipeline(trained):
    """Return a function that trains a case in two pipeline stages."""
    return lambda case: trained(PIPELINE | case, "--pp", "2")


def steps_of_replays(result):
    return [step for step, replays in enumerate(result["step_replays"]) if replays]


@pytest.mark.parametrize("case", mostly_long(CAPTURED, CAPTURED[1]))
def test_own_loop_captures_each_shape(train, case):
    assert_steps_replay(train(case))


@pytest.mark.parametrize("case", mostly_long(EAGER, EAGER[2]))
def test_other_shapes_run_eagerly(train, case):
    result = train(case)
    assert_as_eager(result)
    unchanged = case.get("later_on_one_rank")  # on the first rank, whose replays are counted
    assert steps_of_replays(result) == list(range(CAPTURED_AFTER, case["steps"] if unchanged else CAPTURED_AFTER + 1))


@pytest.mark.parametrize("case", mostly_long(INTERLEAVED, INTERLEAVED[0]))
def test_two_forward_passes_before_backward_are_not_captured(train, case):
    result = train(case)
    assert_as_eager(result)
    assert (result["graphs"], steps_of_replays(result)) == (0, [])


def assert_steps_replay(result, eager=()):
    assert_as_eager(result)
    assert steps_of_replays(result) == [*{*range(CAPTURED_AFTER, len(result["losses"]))} - {*eager}]
    assert len(set(result["step_replays"][CAPTURED_AFTER:]) - {0}) == 1


@pytest.mark.parametrize("case", mostly_long(MASKED, MASKED[0]))
def test_steps_replay_with_and_without_an_attention_mask(train, case):
    # Graphs of the model have no mask if no earlier call had one.
    unseen = case["masked_step"] > CAPTURED_AFTER and not {"modules", "wrapper"} & case.keys()
    assert_steps_replay(train(case), eager=[4] if unseen else [])


@pytest.mark.long
@pytest.mark.parametrize("case", MASKED_IN_PIPELINE)
def test_chunks_replay_with_and_without_an_attention_mask(pipeline, case):
    assert_steps_replay(pipeline(case))


@pytest.mark.parametrize("case", mostly_long(MICROBATCHES, MICROBATCHES[0]))
def test_graphs_are_recaptured_for_each_number_of_micro_batches(pipeline, case):
    result = pipeline(case)
    assert_as_eager(result)
    passes = 2 * case.get("virtual", 1) if captures_model(case) else PIPELINE["layers"]  # per stage, in both directions
    after = [passes * case["microbatches_later"]] * (PIPELINE["steps"] - CAPTURED_AFTER - 1)
    assert result["step_replays"] == [0] * CAPTURED_AFTER + [passes * case["microbatches"], *after]


@pytest.mark.long
@pytest.mark.parametrize("case", NO_RECAPTURES)
def test_other_numbers_of_micro_batches_are_eager_at_the_limit(pipeline, case):
    result = pipeline(case)
    assert_as_eager(result)
    assert (steps_of_replays(result), result["graphs"]) == ([CAPTURED_AFTER], 0)


@pytest.mark.parametrize("case", mostly_long([OTHER_LENGTHS, OTHER_LENGTHS | {"virtual": 2}]))
def test_chunks_run_eagerly_with_another_sequence_length(pipeline, case):
    result = pipeline(case)
    assert_as_eager(result)
    assert steps_of_replays(result) == [3, 6, 7]


@pytest.mark.long
def test_training_loop_recaptures_when_the_batch_grows(tmp_path):
    flags = (
        "--train-iters 9 --pipeline-model-parallel-size 2 --num-layers 4 --untie-embeddings-and-output-weights "
        "--step-batch-size-schedule 0:4,768:8"  # two micro-batches; four from step 7 on
    )
    eager, graphed = (pretrain(tmp_path / str(graphs), flags, graphs=graphs) for graphs in (False, True))
    assert numbers(graphed) == numbers(eager)
    assert [step["graphs"] for step in graphed] == [0] * 3 + [2] * 3 + [4] * 3
