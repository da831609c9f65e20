"""Test that HSDP training with graphs is bit-identical to eager, with two replicas of two CPU ranks."""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import assert_as_eager, assert_differs_from, assert_went_on_eagerly
from tests.support.trainings.models import FULL_RECOMPUTE
from tests.support.trainings.rounding import ROUNDING

SIZES: dict[str, Any] = {"num_distributed_optimizer_instances": 2, "layers": 3, "hidden": 32, "sequence": 16}
SIZES |= {"steps": 7}
OPTIM: dict[str, Any] = {"outer_dp_sharding_strategy": "optim"}
MODEL, LAYER = {"holds": "model"}, {"holds": "layer"}
BF16: dict[str, Any] = {"dtype": "bf16", "microbatches": 2}
GROUPED: dict[str, Any] = {"experts": 4, "moe_use_grouped_tensor": True}
# Some steps run eagerly, on all ranks or on one rank while the others replay.
SHORTER: dict[str, Any] = {"sequences_later": [8, 16], "steps": 8}
ONE_RANK: dict[str, Any] = SHORTER | {"later_on_one_rank": True, "microbatches": 2}
CASES: list[dict[str, Any]] = [
    MODEL | {"dropout": 0.1},
    MODEL | BF16,
    MODEL | OPTIM | {"dropout": 0.1, "evaluates": True, "warmup": 0},
    MODEL | OPTIM | BF16 | {"norm_on_device": True},
    MODEL | OPTIM | {"dtype": "bf16", "microbatches": 3, "microbatches_later": 1, "evaluates": "often"},
    MODEL | OPTIM | {"control": "captured_again", "microbatches": 2},
    MODEL | OPTIM | {"dtype": "fp16", "steps": 10},
    LAYER | BF16,
    LAYER | OPTIM | {"dropout": 0.1, "microbatches": 2, "evaluates": True},
    OPTIM | BF16 | {"modules": ["attn"]},
    OPTIM | {"experts": 4, "modules": ["attn", "moe_router"], "microbatches": 2},
    MODEL | OPTIM | BF16 | {"mtp": 1, "dropout": 0.1},
    MODEL | OPTIM | BF16 | FULL_RECOMPUTE,
    MODEL | OPTIM | BF16 | GROUPED,
    MODEL | OPTIM | BF16 | {"pattern": "M*-M"},
    MODEL | OPTIM | BF16 | {"fp8": "delayed"},
    MODEL | OPTIM | SHORTER | {"microbatches": 2},
    MODEL | OPTIM | ONE_RANK | {"dtype": "bf16"},
    LAYER | ONE_RANK,
]
# Each rank of a replica holds unsharded gradients of its own experts.
EXPERTS: list[dict[str, Any]] = [
    {"experts": 4, "moe_expert_capacity_factor": 1.0, **BF16, **case} for case in (MODEL | OPTIM, LAYER | OPTIM)
]
FAILED: list[dict[str, Any]] = [
    MODEL | OPTIM | {"control": "failed_backward_capture", "microbatches": 2},
    OPTIM | {"control": "fallback_after_a_failure_on_one_rank"},
    LAYER | OPTIM | {"control": "failed_backward_capture"},
]


@pytest.fixture
def train(trained):
    """Return a function that trains a case on four ranks."""
    return lambda case, *options: trained(SIZES | case, "--instances", "2", *options, ranks=4)


def replays_of_a_step(case):
    """Return the expected number of replays in the last step.

    For each micro-batch, the whole pass or every layer replays a forward and a backward graph.
    """
    microbatches = case.get("microbatches_later") or case.get("microbatches", 1)
    by_layer = case.get("modules") or case.get("holds") == "layer"
    return 2 * microbatches * (SIZES["layers"] if by_layer else 1)


@pytest.mark.parametrize("case", mostly_long(CASES, CASES[4]))
def test_graphs_are_bit_identical_to_eager(train, case):
    result = train(case)
    assert_as_eager(result)
    assert result["replays"] == replays_of_a_step(case)
    if case.get("norm_on_device"):
        assert result["clipping_replays"] >= 2


@pytest.mark.long
@pytest.mark.parametrize("case", EXPERTS)
def test_expert_parallel_graphs_are_bit_identical_to_eager(train, case):
    result = train(case, "--ep", "2")
    assert_as_eager(result)
    assert result["replays"] == replays_of_a_step(case)


@pytest.mark.long
@pytest.mark.parametrize("case", FAILED)
def test_training_continues_eagerly_after_a_failed_capture(train, case):
    assert_went_on_eagerly(train(case))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        MODEL | {"control": "not_reduced_across_replicas"},
        MODEL | OPTIM | {"control": "not_gathered_across_replicas"},
    ],
)
def test_missing_communication_between_replicas_changes_the_loss(train, case):
    assert_differs_from(train(case), 4)


@pytest.mark.long
@pytest.mark.parametrize(("layout", "case"), [("", {}), ("--tp 2", {}), ("--ep 2", {"experts": 4})])
def test_gradient_norms_equal_those_without_replicas(train, trained, layout, case):
    case = SIZES | {"fsdp_double_buffer": False, "steps": 2, **case}  # ends before the capture
    alone = trained(case | {"num_distributed_optimizer_instances": 1, "unchecked": True}, *layout.split(), ranks=4)
    replicas = train(OPTIM | case | {"unchecked": True}, *layout.split())
    assert_as_eager(replicas)
    assert replicas["grad_norms"] == pytest.approx(alone["grad_norms"], rel=ROUNDING)
