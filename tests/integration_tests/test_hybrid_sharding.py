"""Hybrid sharding, two instances of two CPU ranks: with graphs a model trains bit for bit as it does eagerly."""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import Trained, assert_as_eager, assert_differs_from, assert_went_on_eagerly
from tests.support.trainings.launch import name_of

SIZES: dict[str, Any] = {"instances": 2, "layers": 3, "hidden": 32, "sequence": 16, "steps": 7}
OPTIM = {"outer": "optim"}
MODEL, LAYER = {"holds": "model"}, {"holds": "layer"}
WHOLE_MODEL: list[dict[str, Any]] = [
    MODEL | case
    for case in (
        {"dropout": 0.1},
        {"dtype": "bf16", "microbatches": 2},
        OPTIM | {"dropout": 0.1, "evaluates": True},
        OPTIM | {"dtype": "bf16", "microbatches": 2, "norm_on_device": True},
        OPTIM | {"dtype": "bf16", "microbatches": 3, "microbatches_later": 1, "evaluates_often": True},
        OPTIM | {"warmup": 0, "dropout": 0.1},
        OPTIM | {"dtype": "bf16", "optimizer_graph": True},
        OPTIM | {"control": "captured_again", "microbatches": 2},
        OPTIM | {"dtype": "fp16", "steps": 10},
    )
]
DECODER: list[dict[str, Any]] = [
    {"microbatches": 2, "dropout": 0.1},
    OPTIM | {"dtype": "bf16", "microbatches": 2, "evaluates": True},
    OPTIM | {"experts": 4, "grouped_tensor": True, "microbatches": 2},
]
LAYERS: list[dict[str, Any]] = [
    LAYER | {"dtype": "bf16", "microbatches": 2},
    LAYER | OPTIM | {"dropout": 0.1, "microbatches": 2, "evaluates": True},
    OPTIM | {"modules": ["attn"], "dtype": "bf16", "microbatches": 2},
    OPTIM | {"experts": 4, "modules": ["attn", "moe_router"], "microbatches": 2},
]
# Beside what else graphs of the whole model hold.
OTHERS: list[dict[str, Any]] = [
    MODEL | OPTIM | {"dtype": "bf16", "microbatches": 2, **case}
    for case in (
        {"mtp": 1, "dropout": 0.1},
        {"config": ["recompute_granularity='full'", "recompute_method='uniform'", "recompute_num_layers=1"]},
        {"experts": 4, "grouped_tensor": True},
        {"pattern": "M*-M"},
        {"fp8": "delayed"},
    )
]
# Experts of an instance are shared out among its ranks: each has gradients of its own whole.
EXPERTS: list[dict[str, Any]] = [
    {"experts": 4, "capacity": 1.0, "microbatches": 2, "dtype": "bf16", **case}
    for case in (MODEL, MODEL | OPTIM, OPTIM, LAYER | OPTIM)
]
# Some steps run eagerly: on all ranks, or on the last one while the others replay.
SHORTER: dict[str, Any] = {"sequences_later": [8, 16], "steps": 8, "max_captures": 1}
CHANGED: list[dict[str, Any]] = [
    SHORTER | case
    for case in (
        MODEL | OPTIM | {"microbatches": 2},
        MODEL | {"microbatches": 2, "later_on_one_rank": True},
        MODEL | OPTIM | {"dtype": "bf16", "microbatches": 2, "later_on_one_rank": True},
        OPTIM | {"microbatches": 2, "later_on_one_rank": True},
        LAYER | {"microbatches": 2, "later_on_one_rank": True},
        LAYER | OPTIM | {"later_on_one_rank": True},
    )
]
EQUAL = [*WHOLE_MODEL, *DECODER, *LAYERS, *OTHERS, *CHANGED]
QUICK = [WHOLE_MODEL[4], LAYERS[1]]
FAILED: list[dict[str, Any]] = [
    MODEL | OPTIM | {"control": "failed_backward_capture", "microbatches": 2},
    MODEL | {"control": "fallback_after_a_failure_on_one_rank"},
    OPTIM | {"control": "fallback_after_a_failure_on_one_rank"},
    LAYER | OPTIM | {"control": "failed_backward_capture"},
]
# A step's last replay, or its first one, as any other: nothing is sent between instances.
DEAD: list[dict[str, Any]] = [
    {**MODEL, "control": "not_reduced_between_instances"},
    {**MODEL, **OPTIM, "control": "not_gathered_between_instances"},
]


@pytest.fixture(scope="module")
def results(compare_runs):
    return Trained([*EQUAL, *FAILED, *DEAD], compare_runs, SIZES, "--instances", "2", ranks=4)


@pytest.fixture(scope="module")
def of_experts(compare_runs):
    return Trained(EXPERTS, compare_runs, SIZES, "--instances", "2", "--ep", "2", ranks=4)


def replays_of_a_step(case):
    """How often graphs are replayed in the last step of ``case``: for each of its micro-batches twice, or per layer."""
    microbatches = case.get("microbatches_later") or case.get("microbatches", 1)
    by_layer = case.get("modules") or case.get("holds") == "layer"
    return 2 * microbatches * (SIZES["layers"] if by_layer else 1)


@pytest.mark.parametrize("case", mostly_long(EQUAL, *QUICK), ids=name_of)
def test_graphs_train_bit_for_bit_as_eager(results, case):
    result = results[name_of(case)]
    assert_as_eager(result)
    assert result["replays"] == replays_of_a_step(case)


@pytest.mark.parametrize("case", mostly_long(EXPERTS, EXPERTS[1]), ids=name_of)
def test_experts_of_each_rank_train_bit_for_bit_as_eager(of_experts, case):
    result = of_experts[name_of(case)]
    assert_as_eager(result)
    assert result["replays"] == replays_of_a_step(case)


@pytest.mark.parametrize("case", mostly_long(FAILED, FAILED[0]), ids=name_of)
def test_after_a_failed_capture_a_model_trains_on_eagerly(results, case):
    assert_went_on_eagerly(results[name_of(case)])


def test_the_clipping_of_gradients_is_replayed(results):
    assert results[name_of(WHOLE_MODEL[3])]["clipping_replays"] >= 2


@pytest.mark.long
@pytest.mark.parametrize("case", DEAD, ids=name_of)
def test_what_is_not_sent_between_instances_is_noticed(results, case):
    assert_differs_from(results[name_of(case)], 4)
