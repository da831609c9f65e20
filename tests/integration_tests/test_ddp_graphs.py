"""Test that DistributedDataParallel with a graph per layer trains bit-identically to eager, on two CPU ranks.

Layouts: data parallel with the distributed optimizer; two pipeline stages with one or two model chunks each. Each
negative control breaks one part of the capture.
"""

import os
from typing import Any

import pytest
import torch

from tests.support.sample import mostly_long
from tests.support.trainings.compared import assert_as_eager, assert_differs_from

DDP: dict[str, Any] = {"wrapper": "ddp", "steps": 7, "hidden": 32, "sequence": 16, "layers": 2}
MOE: dict[str, Any] = {"experts": 4, "modules": ["attn", "moe_router", "moe_preprocess"]}
DATA_PARALLEL: list[dict[str, Any]] = [
    {"dropout": 0.1, "microbatches": 2, "microbatches_later": 3, "evaluates": True},
    {"dtype": "bf16", "overlap_param_gather": False},
    {"warmup": 0, "average_in_collective": True},
    {"dropout": 0.1, **MOE},
    {"dropout": 0.1, "mtp": 1},
]
PIPELINE: list[dict[str, Any]] = [
    {"layers": 4, "dropout": 0.1, "microbatches": 4},
    {"dtype": "bf16", "microbatches": 3, **MOE},
    {"layers": 4, "virtual": 2, "dropout": 0.1, "evaluates": True, "microbatches": 4},
]


@pytest.mark.parametrize("case", mostly_long(DATA_PARALLEL, DATA_PARALLEL[3]))
def test_data_parallel_graphs_are_bit_identical_to_eager(trained, case):
    result = trained(DDP | case)
    assert_as_eager(result)
    assert result["graphs"] == DDP["layers"] + case.get("mtp", 0)


def test_ranks_use_the_instruction_set_and_threads_of_the_tests(trained):
    """Check the settings that ``make test-processors`` varies."""
    result = trained(DDP | DATA_PARALLEL[3])
    assert (result["instructions"], result["threads"]) == (
        torch.backends.cpu.get_cpu_capability(),
        int(os.environ["OMP_NUM_THREADS"]),
    )


@pytest.mark.parametrize("case", mostly_long(PIPELINE, PIPELINE[2]))
def test_pipeline_graphs_are_bit_identical_to_eager(trained, case):
    result = trained(DDP | case, "--pp", "2")
    assert_as_eager(result)
    assert result["graphs"] == case.get("layers", DDP["layers"]) // 2 * case["microbatches"]


@pytest.mark.long
def test_dead_replay_changes_the_loss(trained):
    assert_differs_from(trained(DDP | {"microbatches": 2, "control": "dead_replay"}, "--pp", "2"), 3)


def test_missing_manual_hooks_break_the_order_of_gathers(trained):
    assert "start_param_sync" in trained(DDP | {"control": "no_manual_hooks"})["error"]
