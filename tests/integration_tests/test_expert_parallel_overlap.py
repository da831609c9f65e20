"""Overlapped expert communication (--overlap-moe-expert-parallel-comm): graphs end before the experts.

The schedule runs layers in parts, the forward pass of one micro-batch beside the backward pass of another. On two CPU
ranks, under Megatron-FSDP and DistributedDataParallel, training is bit-identical to eager with the same schedule.
Negative controls break one thing each.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import (
    assert_as_eager,
    assert_differs_from,
    assert_went_on_eagerly,
    replays_of_evaluations,
)

SIZES: dict[str, Any] = {"experts": 4, "dtype": "bf16", "layers": 2, "microbatches": 3, "steps": 6}
OVERLAP: dict[str, Any] = SIZES | {"overlap_moe_expert_parallel_comm": True, "fsdp_double_buffer": False}
ONE_DENSE: dict[str, Any] = {"layers": 3, "moe_layer_freq": [0, 1, 1]}
PARTS: dict[str, Any] = {"modules": ["attn", "moe_router", "moe_preprocess"]}
SHARED: dict[str, Any] = {"moe_shared_expert_intermediate_size": 64}
# Also compared with training without the overlap.
IN_TURN: list[dict[str, Any]] = [
    {**PARTS, **case}
    for case in (
        {"mtp": 1},
        {"tied": False},
        {"data_parallel_sharding_strategy": "no_shard"},
        {"data_parallel_sharding_strategy": "optim"},
        {"data_parallel_sharding_strategy": "optim_grads", "mtp": 1},
    )
]
CASES: list[dict[str, Any]] = [
    {**PARTS, "dtype": "fp16", "microbatches": 1},
    {**PARTS, **ONE_DENSE, "dropout": 0.1, "moe_expert_capacity_factor": 1.0},
    {**PARTS, "microbatches": 2, "microbatches_later": 4, "evaluates": True},
    {**PARTS, "evaluates": "often", "dropout": 0.1, "layers": 4, **SHARED},
    {**PARTS, "evaluates": "often", "data_parallel_sharding_strategy": "optim_grads", "evaluated_sequence": 16},
    {"modules": ["attn"], "evaluates": "often", **ONE_DENSE, "mtp": 1},
    {"modules": ["attn", "moe_router"], "evaluates": True, "data_parallel_sharding_strategy": "no_shard"},
    {**PARTS, "data_parallel_sharding_strategy": "no_shard", "optimizer_graph": True},
    {**PARTS, "control": "captured_again"},
    {**PARTS, "control": "taken_addresses"},
    {"modules": ["attn"], **SHARED},
    {"modules": ["moe_router"], **SHARED, "layers": 1, "dropout": 0.1},
    {**PARTS, "wrapper": "ddp", "dropout": 0.1, "evaluates": True, "mtp": 1},
    {"modules": ["attn", "moe_router"], **ONE_DENSE, "wrapper": "ddp", "microbatches": 2, "microbatches_later": 4},
    *IN_TURN,
]


@pytest.fixture
def train(trained):
    """Return a function that trains a case with the overlap, on two ranks with two experts each."""
    return lambda case: trained(OVERLAP | case, "--ep", "2")


@pytest.mark.parametrize("case", mostly_long(CASES, CASES[-1]))
def test_graphs_are_bit_identical_to_eager(train, case):
    result = train(case)
    assert_as_eager(result)
    layers = case.get("layers", SIZES["layers"]) + case.get("mtp", 0)
    microbatches = case.get("microbatches_later") or case.get("microbatches", SIZES["microbatches"])
    assert (result["graphs"], result["replays"]) == (layers * microbatches, 2 * layers * microbatches)
    assert result["evaluation_replays"] == replays_of_evaluations(SIZES | case, 0)


@pytest.mark.long
@pytest.mark.parametrize("case", IN_TURN)
def test_overlap_changes_no_gradient(trained, train, case):
    """Embedding, output layer and multi-token prediction share parameters in separate autograd passes."""
    result, overlapped = trained(SIZES | case, "--ep", "2"), train(case)
    assert not result["error"]
    assert (overlapped["losses"], overlapped["grad_norms"]) == (result["losses"], result["grad_norms"])


@pytest.mark.long
@pytest.mark.parametrize("control", ["failed_forward_capture", "fallback_after_a_failure_on_one_rank"])
def test_training_continues_eagerly_after_a_failed_capture(train, control):
    assert_went_on_eagerly(train({**PARTS, "control": control}))


@pytest.mark.long
def test_dead_replay_changes_the_loss(train):
    assert_differs_from(train({"modules": ["attn"], "control": "dead_replay"}), 3)


def test_missing_gathers_replay_stale_weights(train):
    assert_differs_from(train({**PARTS, "control": "replays_that_gather_nothing"}), 4)


@pytest.mark.long
def test_moved_weights_are_an_error(compare_runs):
    # Weights may have moved on one rank only: the first error ends all ranks.
    case = OVERLAP | PARTS | {"control": "buckets_not_kept"}
    (result,) = compare_runs([case], "--ep", "2", "--stop-at-error")
    assert "ChangedSinceCaptureError" in result["error"] or "StaleAddress" in result["error"]


@pytest.mark.parametrize("wrapper", mostly_long(["fsdp", "ddp"], "fsdp"))
def test_whole_layers_are_refused(train, wrapper):
    result = train({"wrapper": wrapper, "microbatches": 1})
    assert "set --cuda-graph-modules attn moe_router moe_preprocess" in result["error"]
