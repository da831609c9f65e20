"""Without Megatron-FSDP: a model with a graph per layer trains bit for bit as it does eagerly, on two CPU ranks.

It is under DistributedDataParallel with the distributed optimizer, data parallel or in two pipeline stages, each with
one model chunk (1F1B) or with two that interleave. Loss and gradient norm of every step and what the optimizer owns are
compared, over 7 steps with capture after 3. The controls break one thing each, and must be noticed.
"""

import os
from typing import Any

import pytest
import torch

from tests.support.sample import mostly_long
from tests.support.trainings.compared import Trained, assert_as_eager, assert_differs_from
from tests.support.trainings.launch import name_of

DDP: dict[str, Any] = {"fsdp": False, "steps": 7, "hidden": 32, "sequence": 16}
MOE: dict[str, Any] = {"experts": 4, "modules": ["attn", "moe_router", "moe_preprocess"]}
DATA_PARALLEL: list[dict[str, Any]] = [
    {"layers": 2, "dropout": 0.1, "microbatches": 2, "microbatches_later": 3},
    {"layers": 2, "dtype": "bf16", "overlap_param_gather": False},
    {"layers": 2, "warmup": 0, "averaged": True},
    {"layers": 2, "dropout": 0.1, "evaluates": True},
    {"layers": 2, "dropout": 0.1, **MOE},
    {"layers": 2, "dropout": 0.1, "mtp": 1},
]
PIPELINE: list[dict[str, Any]] = [
    {"layers": 4, "dropout": 0.1, "microbatches": 4},
    {"layers": 2, "dtype": "bf16", "microbatches": 3, **MOE},
    {"layers": 4, "virtual": 2, "dtype": "bf16", "microbatches": 4},
    {"layers": 4, "virtual": 2, "dropout": 0.1, "evaluates": True, "microbatches": 4},
]
DEAD_REPLAY: dict[str, Any] = {"layers": 2, "microbatches": 2, "control": "dead_replay"}
NO_MANUAL_HOOKS: dict[str, Any] = {"layers": 2, "control": "no_manual_hooks"}


@pytest.fixture(scope="module")
def data_parallel(compare_runs):
    return Trained([*DATA_PARALLEL, NO_MANUAL_HOOKS], compare_runs, DDP)


@pytest.fixture(scope="module")
def pipeline(compare_runs):
    return Trained([*PIPELINE, DEAD_REPLAY], compare_runs, DDP, "--pp", "2")


def assert_bit_equal(result, graphs):
    assert_as_eager(result)
    assert result["graphs"] == graphs
    assert len(result["losses"]) == DDP["steps"]


@pytest.mark.parametrize("case", mostly_long(DATA_PARALLEL, DATA_PARALLEL[4]), ids=name_of)
def test_data_parallel_graphs_train_bit_for_bit_as_eager(data_parallel, case):
    assert_bit_equal(data_parallel[name_of(case)], graphs=case["layers"] + case.get("mtp", 0))


def test_ranks_have_the_instruction_set_and_the_threads_that_the_tests_are_run_with(data_parallel):
    """``make test-processors`` sets them."""
    result = data_parallel[name_of(DATA_PARALLEL[0])]
    assert (result["instructions"], result["threads"]) == (
        torch.backends.cpu.get_cpu_capability(),
        int(os.environ["OMP_NUM_THREADS"]),
    )


@pytest.mark.parametrize("case", mostly_long(PIPELINE, PIPELINE[3]), ids=name_of)
def test_pipelined_graphs_train_bit_for_bit_as_eager(pipeline, case):
    assert_bit_equal(pipeline[name_of(case)], graphs=case["layers"] // 2 * case["microbatches"])


def test_a_replay_that_does_nothing_changes_the_loss(pipeline):
    assert_differs_from(pipeline[name_of(DEAD_REPLAY)], 3)


def test_layers_that_do_not_gather_their_parameters_break_the_order_of_gathers(data_parallel):
    assert "start_param_sync" in data_parallel[name_of(NO_MANUAL_HOOKS)]["error"]
