"""Test overlapped expert communication (--overlap-moe-expert-parallel-comm), where graphs end before the experts.

The schedule splits layers and overlaps one micro-batch's forward pass with another's backward pass. On two CPU
ranks under DistributedDataParallel, training is bit-identical to eager with the same schedule. Under Megatron-FSDP
graphs are rejected.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import assert_as_eager, replays_of_evaluations

SIZES: dict[str, Any] = {"experts": 4, "dtype": "bf16", "layers": 2, "microbatches": 3, "steps": 6, "wrapper": "ddp"}
OVERLAP: dict[str, Any] = SIZES | {"overlap_moe_expert_parallel_comm": True, "fsdp_double_buffer": False}
ONE_DENSE: dict[str, Any] = {"layers": 3, "moe_layer_freq": [0, 1, 1]}
CASES: list[dict[str, Any]] = [
    {"modules": ["attn", "moe_router", "moe_preprocess"], "dropout": 0.1, "evaluates": True, "mtp": 1},
    {"modules": ["attn", "moe_router", "moe_preprocess"], "moe_use_grouped_tensor": True, "mtp": 1},
    {"modules": ["attn", "moe_router"], **ONE_DENSE, "microbatches": 2, "microbatches_later": 4},
]


@pytest.fixture
def train(trained):
    """Return a function that trains a case with overlap on two ranks with two experts each."""
    return lambda case: trained(OVERLAP | case, "--ep", "2")


@pytest.mark.parametrize("case", mostly_long(CASES, CASES[-1]))
def test_graphs_are_bit_identical_to_eager(train, case):
    result = train(case)
    assert_as_eager(result)
    layers = case.get("layers", SIZES["layers"]) + case.get("mtp", 0)
    microbatches = case.get("microbatches_later") or case.get("microbatches", SIZES["microbatches"])
    assert (result["graphs"], result["replays"]) == (layers * microbatches, 2 * layers * microbatches)
    assert result["evaluation_replays"] == replays_of_evaluations(SIZES | case, 0)


def test_whole_layers_are_refused(train):
    result = train({"microbatches": 1})
    assert "set --cuda-graph-modules attn moe_router moe_preprocess" in result["error"]
