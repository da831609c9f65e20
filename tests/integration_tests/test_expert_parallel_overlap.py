"""Graphs of what precedes the experts, while the tokens of another micro-batch travel between two CPU ranks.

With ``--overlap-moe-expert-parallel-comm`` a schedule runs layers in parts, the forward pass of one micro-batch beside
the backward pass of another. Loss and gradient norm of every step and what the optimizer owns are those of eager
training with the same schedule, bit for bit, under Megatron-FSDP and under DistributedDataParallel. The controls break
one thing each, and must be noticed.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import Trained, assert_as_eager, assert_differs_from, assert_went_on_eagerly
from tests.support.trainings.evaluations import replays_of_evaluations
from tests.support.trainings.launch import name_of

BEFORE_EXPERTS = ["attn", "moe_router", "moe_preprocess"]
OVERLAP: dict[str, Any] = {"ep_overlap": True, "double_buffer": False}
SIZES: dict[str, Any] = {"experts": 4, "dtype": "bf16", "layers": 2, "microbatches": 3, "steps": 6}
ONE_DENSE: dict[str, Any] = {"layers": 3, "moe_layer_freq": [0, 1, 1]}
PARTS: dict[str, Any] = {"modules": BEFORE_EXPERTS}
SHARDED: list[dict[str, Any]] = [
    {**PARTS, "dropout": 0.1, "layers": 4},
    {**PARTS, "dtype": "fp16", "microbatches": 1},
    {**PARTS, **ONE_DENSE, "dropout": 0.1, "capacity": 1.0},
    {**PARTS, "microbatches": 2, "microbatches_later": 4, "evaluates": True},
    {**PARTS, "evaluates_often": True, "dropout": 0.1, "shared_experts": 64},
    {**PARTS, "evaluates_often": True, "strategy": "optim_grads", "tied": False, "evaluated_sequence": 16},
    {"modules": ["attn"], "evaluates_often": True, **ONE_DENSE, "mtp": 1},
    {"modules": ["attn", "moe_router"], "evaluates": True, "strategy": "no_shard"},
    {**PARTS, "strategy": "no_shard", "optimizer_graph": True},
    {**PARTS, "control": "captured_again"},
    {**PARTS, "control": "taken_addresses"},
    {"modules": ["attn"], "shared_experts": 64},
    {"modules": ["moe_router"], "shared_experts": 64, "layers": 1, "dropout": 0.1},
]
SURVIVED: list[dict[str, Any]] = [
    {**PARTS, "control": "failed_forward_capture"},
    {**PARTS, "control": "fallback_after_a_failure_on_one_rank"},
]
DDP: list[dict[str, Any]] = [
    {**PARTS, "dropout": 0.1, "evaluates": True, "mtp": 1},
    {"modules": ["attn", "moe_router"], **ONE_DENSE, "microbatches": 2, "microbatches_later": 4},
]
NOT_KEPT: dict[str, Any] = {**PARTS, "control": "buckets_not_kept"}
NOT_GATHERED: dict[str, Any] = {**PARTS, "control": "replays_that_gather_nothing"}
DEAD: dict[str, Any] = {"modules": ["attn"], "control": "dead_replay"}
# Trained with and without the overlap.
IN_TURN: list[dict[str, Any]] = [
    {**PARTS, **case}
    for case in (
        *({}, {"mtp": 1}, {"tied": False}),
        *(
            {"strategy": "no_shard"},
            {"strategy": "optim"},
            {"strategy": "optim_grads"},
            {"strategy": "optim_grads", "mtp": 1},
        ),
    )
]
SHARDED += IN_TURN


@pytest.fixture(scope="module")
def train(compare_runs):
    """A function that returns the results of cases on two ranks with two experts each, by name."""

    def run(cases, **common):
        return Trained(cases, compare_runs, SIZES | common, "--ep", "2")

    return run


@pytest.fixture(scope="module")
def sharded(train):
    return train([*SHARDED, *SURVIVED, NOT_GATHERED, DEAD], **OVERLAP)


@pytest.fixture(scope="module")
def in_turn(train):
    return train(IN_TURN)


@pytest.fixture(scope="module")
def ddp(train):
    return train(DDP, **OVERLAP, fsdp=False)


def assert_bit_equal(result, case):
    assert_as_eager(result)
    layers = case.get("layers", SIZES["layers"]) + case.get("mtp", 0)
    microbatches = case.get("microbatches_later") or case.get("microbatches", SIZES["microbatches"])
    assert result["graphs"] == layers * microbatches
    assert result["replays"] == 2 * layers * microbatches
    assert len(result["losses"]) == SIZES["steps"]
    assert result["evaluation_replays"] == replays_of_evaluations(SIZES | case, 0)


@pytest.mark.parametrize("case", mostly_long(SHARDED, IN_TURN[-1]), ids=name_of)
def test_graphs_under_fsdp_train_bit_for_bit_as_eager(sharded, case):
    assert_bit_equal(sharded[name_of(case)], case)


@pytest.mark.parametrize("case", mostly_long(DDP, DDP[1]), ids=name_of)
def test_graphs_without_fsdp_train_bit_for_bit_as_eager(ddp, case):
    assert_bit_equal(ddp[name_of(case)], case)


@pytest.mark.parametrize("case", mostly_long(IN_TURN, IN_TURN[-1]), ids=name_of)
def test_the_overlap_changes_no_gradient(in_turn, sharded, case):
    """Embedding, output layer and multi-token prediction run in autograd passes of their own, and share parameters."""
    result, overlapped = in_turn[name_of(case)], sharded[name_of(case)]
    assert not result["error"]
    assert (overlapped["losses"], overlapped["grad_norms"]) == (result["losses"], result["grad_norms"])


@pytest.mark.parametrize("case", SURVIVED, ids=name_of)
def test_training_goes_on_eagerly_after_a_failed_capture(sharded, case):
    result = sharded[name_of(case)]
    assert_went_on_eagerly(result)


def test_a_replay_that_does_nothing_changes_the_loss(sharded):
    assert_differs_from(sharded[name_of(DEAD)], 3)


def test_weights_that_replays_do_not_gather_are_those_of_the_step_before(sharded):
    assert_differs_from(sharded[name_of(NOT_GATHERED)], 4)


def test_weights_that_are_not_kept_in_place_are_noticed(compare_runs):
    # On one rank only, perhaps: the first error ends all ranks.
    (result,) = compare_runs([SIZES | OVERLAP | NOT_KEPT], "--ep", "2", "--stop-at-error")
    assert "ChangedSinceCaptureError" in result["error"] or "StaleAddress" in result["error"]


@pytest.mark.parametrize("fsdp", [True, False], ids=["fsdp", "ddp"])
def test_whole_layers_are_refused(compare_runs, fsdp):
    (result,) = compare_runs([SIZES | OVERLAP | {"fsdp": fsdp, "microbatches": 1}], "--ep", "2")
    assert "set --cuda-graph-modules attn moe_router moe_preprocess" in result["error"]
