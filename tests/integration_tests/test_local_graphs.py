"""Test that local graphs train bit-identically to eager, on two CPU ranks.

Under DistributedDataParallel with the distributed optimizer: data parallel, tensor parallel, or two pipeline stages
with one or two model chunks each. The first step is recorded; later steps replay.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import assert_as_eager, assert_differs_from, assert_went_on_eagerly

LOCAL: dict[str, Any] = {"local": True, "wrapper": "ddp", "layers": 3, "steps": 7, "warmup": 1}
LOCAL |= {"hidden": 32, "sequence": 16}
MOE: dict[str, Any] = {"experts": 4, "modules": ["attn", "moe_router"]}
LAYOUTS: dict[str, tuple[str, ...]] = {"DP2": (), "TP2": ("--tp", "2"), "PP2": ("--pp", "2")}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("DP2", {"dropout": 0.1, "microbatches": 2, "microbatches_later": 3, "dtype": "bf16"}),
    ("DP2", {"dropout": 0.1, "evaluates": True}),
    ("DP2", {"overlap_param_gather": False, "warmup": 0}),
    ("DP2", {"gradient_accumulation_fusion": True, "microbatches": 2}),
    ("DP2", {"recompute_modules": ["core_attn"]}),
    ("DP2", {"recompute_modules": ["mlp"], "microbatches": 2}),
    ("DP2", {"recompute_modules": ["moe"], "microbatches": 2, **MOE}),
    ("DP2", {"dropout": 0.1, "moe_shared_expert_intermediate_size": 64, "microbatches": 2, "dtype": "bf16", **MOE}),
    ("DP2", {"experts": 4, "moe_expert_capacity_factor": 1.0, "microbatches": 2}),
    ("DP2", {"mtp": 1, "dropout": 0.1, "microbatches": 2}),
    ("DP2", {"dropout": 0.1, "control": "local_graphs_recorded_again"}),
    ("TP2", {"dropout": 0.1, "microbatches": 2}),
    ("TP2", {"evaluates": True, "control": "observed_evaluation_on_one_rank"}),
    ("PP2", {"layers": 4, "dropout": 0.1, "microbatches": 6, "microbatches_later": 3}),
    ("PP2", {"layers": 2, "dropout": 0.1, "microbatches": 3, **MOE}),
    ("PP2", {"layers": 4, "virtual": 2, "dropout": 0.1, "evaluates": True, "microbatches": 4}),
]
# Megatron-FSDP rejects local graphs, so test_pairs.py does not cover them.
QUICK = [CASES[11], CASES[15]]
ON_ONE_RANK: dict[str, Any] = {"dropout": 0.1, "microbatches": 2, "control": "failed_local_capture_on_one_rank"}


@pytest.fixture
def train(trained):
    """Return a function that trains a case in a layout."""
    return lambda layout, case: trained(LOCAL | case, *LAYOUTS[layout])


def pairs_of_graphs(layout, case):
    """Return the expected number of pairs of forward and backward graphs on each rank.

    Each layer, or part of a layer, has one pair; in a pipeline, one pair per micro-batch.
    """
    layers = case.get("layers", LOCAL["layers"]) + case.get("mtp", 0)
    parts = 2 if "moe_router" in case.get("modules", []) else 1
    return layers * parts * (case["microbatches"] if layout == "PP2" else 2) // 2


@pytest.mark.parametrize(("layout", "case"), mostly_long(CASES, *QUICK))
def test_graphs_are_bit_identical_to_eager(train, layout, case):
    result = train(layout, case)
    assert_as_eager(result)
    assert result["graphs"] == pairs_of_graphs(layout, case)


@pytest.mark.long
def test_training_continues_eagerly_after_a_failed_capture(train):
    assert_went_on_eagerly(train("DP2", {"dropout": 0.1, "control": "failed_local_capture"}))


@pytest.mark.parametrize("layout", mostly_long(["DP2", "TP2"], "TP2"))
def test_rank_with_a_failed_capture_trains_beside_graphs(train, layout):
    result = train(layout, ON_ONE_RANK)
    assert_as_eager(result)
    assert result["graphs"] == pairs_of_graphs(layout, ON_ONE_RANK)  # on the first rank; the last rank has none


def test_dead_replay_changes_the_loss_of_the_second_step(train):
    assert_differs_from(train("DP2", {"control": "dead_local_replay"}), 1)


def test_more_micro_batches_than_recorded_are_refused(compare_runs):
    # Stages wait for each other: the first error ends all ranks.
    case = LOCAL | {"layers": 2, "microbatches": 1, "microbatches_later": 3}
    (result,) = compare_runs([case], "--pp", "2", "--stop-at-error")
    assert "--global-batch-size" in result["error"]


def test_megatron_fsdp_is_refused(train):
    assert "--use-megatron-fsdp with --cuda-graph-impl local" in train("DP2", {"wrapper": "fsdp"})["error"]


def test_error_names_the_uncapturable_layer(train):
    assert "cannot run in a CUDA graph (--cuda-graph-impl local)" in train("DP2", {"experts": 4})["error"]
