"""A model with local graphs trains bit for bit as it does eagerly, on two CPU ranks.

It is under DistributedDataParallel with the distributed optimizer, data or tensor parallel, or in two pipeline stages
with one model chunk each (1F1B) or two that interleave. The first step is recorded, every later one replayed. Loss and
gradient norm of every step and what the optimizer owns are compared. The controls must be noticed or survived.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import Trained, assert_as_eager, assert_differs_from, assert_went_on_eagerly
from tests.support.trainings.launch import name_of

LOCAL: dict[str, Any] = {
    "local": True,
    "fsdp": False,
    "layers": 3,
    "steps": 7,
    "warmup": 1,
    "hidden": 32,
    "sequence": 16,
}
MOE: dict[str, Any] = {"experts": 4, "modules": ["attn", "moe_router"]}
DATA_PARALLEL: list[dict[str, Any]] = [
    {},
    {"dropout": 0.1, "microbatches": 3, "dtype": "bf16"},
    {"dropout": 0.1, "microbatches": 2, "microbatches_later": 3},
    {"dropout": 0.1, "evaluates": True},
    {"overlap_param_gather": False},
    {"warmup": 0},
    {"fused_wgrad": True, "microbatches": 2},
    {"recompute": ["core_attn"]},
    {"recompute": ["mlp"], "microbatches": 2},
    {"dropout": 0.1, **MOE},
    {"recompute": ["moe"], "microbatches": 2, **MOE},
    {"dropout": 0.1, "shared_experts": 64, "microbatches": 2, "dtype": "bf16", **MOE},
    {"experts": 4, "capacity": 1.0, "microbatches": 2},
    {"mtp": 1, "dropout": 0.1, "microbatches": 2},
    {"dropout": 0.1, "control": "local_graphs_recorded_again"},
]
TENSOR_PARALLEL: list[dict[str, Any]] = [
    {"dropout": 0.1, "microbatches": 2},
    {"evaluates": True, "control": "observed_evaluation_on_one_rank"},
]
PIPELINE: list[dict[str, Any]] = [
    {"layers": 4, "dropout": 0.1, "microbatches": 4},
    {"layers": 4, "dropout": 0.1, "microbatches": 6, "microbatches_later": 3},
    {"layers": 2, "dropout": 0.1, "microbatches": 3, **MOE},
    {"layers": 4, "virtual": 2, "dtype": "bf16", "microbatches": 4},
    {"layers": 4, "virtual": 2, "dropout": 0.1, "evaluates": True, "microbatches": 4},
]
SURVIVED: dict[str, Any] = {"dropout": 0.1, "control": "failed_local_capture"}
ON_ONE_RANK: dict[str, Any] = {"dropout": 0.1, "microbatches": 2, "control": "failed_local_capture_on_one_rank"}
DEAD_REPLAY: dict[str, Any] = {"control": "dead_local_replay"}
LAYOUTS: dict[str, tuple[list[str], list[dict[str, Any]]]] = {
    "data parallel": ([], [*DATA_PARALLEL, SURVIVED, ON_ONE_RANK, DEAD_REPLAY]),
    "TP2": (["--tp", "2"], [*TENSOR_PARALLEL, ON_ONE_RANK]),
    "PP2": (["--pp", "2"], PIPELINE),
}
SPECIAL = SURVIVED, ON_ONE_RANK, DEAD_REPLAY
EQUAL = [(layout, case) for layout, (_, cases) in LAYOUTS.items() for case in cases if case not in SPECIAL]
# Megatron-FSDP has no local graphs: no set of flags in test_pairs.py has them.
QUICK = [
    *(("data parallel", DATA_PARALLEL[index]) for index in (3, 6, 14)),
    *(("TP2", TENSOR_PARALLEL[0]), ("PP2", PIPELINE[4])),
]


@pytest.fixture(scope="module")
def results(compare_runs):
    """The results of each layout, by case."""
    return {layout: Trained(cases, compare_runs, LOCAL, *options) for layout, (options, cases) in LAYOUTS.items()}


def pairs_of_graphs(layout, case):
    """How many pairs of graphs a rank has: two for a MoE layer in parts, in a pipeline one for each micro-batch."""
    layers = case.get("layers", LOCAL["layers"]) + case.get("mtp", 0)
    return (
        layers
        * (2 if "moe_router" in case.get("modules", []) else 1)
        * (case["microbatches"] if layout == "PP2" else 2)
        // 2
    )


@pytest.mark.parametrize(
    ("layout", "case"), mostly_long(EQUAL, *QUICK), ids=[f"{layout}: {name_of(case)}" for layout, case in EQUAL]
)
def test_graphs_train_bit_for_bit_as_eager(results, layout, case):
    result = results[layout][name_of(case)]
    assert_as_eager(result)
    assert result["graphs"] == pairs_of_graphs(layout, case)
    assert len(result["losses"]) == LOCAL["steps"]


def test_training_goes_on_eagerly_after_a_failed_capture(results):
    result = results["data parallel"][name_of(SURVIVED)]
    assert_went_on_eagerly(result)


@pytest.mark.parametrize("layout", ["data parallel", "TP2"])
def test_a_rank_whose_capture_failed_trains_on_beside_others_with_graphs(results, layout):
    result = results[layout][name_of(ON_ONE_RANK)]
    assert_as_eager(result)
    assert result["graphs"] == pairs_of_graphs(layout, ON_ONE_RANK)  # of the first rank; the last has none


def test_a_replay_that_does_nothing_changes_the_loss_of_the_second_step(results):
    assert_differs_from(results["data parallel"][name_of(DEAD_REPLAY)], 1)


def test_more_micro_batches_than_were_recorded_are_refused_in_a_pipeline(compare_runs):
    # The stages wait for one another, so the first error ends all ranks.
    case = LOCAL | {"layers": 2, "microbatches": 1, "microbatches_later": 3}
    (result,) = compare_runs([case], "--pp", "2", "--stop-at-error")
    assert "--global-batch-size" in result["error"]


def test_megatron_fsdp_is_refused_by_the_names_of_the_flags(compare_runs):
    (result,) = compare_runs([LOCAL | {"fsdp": True}])
    assert "--use-megatron-fsdp with --cuda-graph-impl local" in result["error"]


def test_a_layer_that_no_graph_can_hold_is_named(compare_runs):
    (result,) = compare_runs([LOCAL | {"experts": 4}])
    assert "cannot run in a CUDA graph (--cuda-graph-impl local)" in result["error"]
