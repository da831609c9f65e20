"""Test that ``HybridModel`` under Megatron-FSDP trains bit-identically to eager with graphs, on two CPU ranks.

Patterns: ``*`` attention, ``-`` MLP, ``E`` MoE, ``M`` Mamba with a stand-in for ``mamba-ssm``'s mixer, ``/`` before
each depth of multi-token prediction, ``|`` between pipeline stages.
"""

from typing import Any

import pytest

from tests.support.sample import mostly_long
from tests.support.trainings.compared import assert_as_eager, assert_differs_from, replays_of_evaluations

SIZES: dict[str, Any] = {"steps": 8}
PADDED = {"experts": 4, "moe_expert_capacity_factor": 1.0}
# Each case, with the layers in graphs and the forward replays per micro-batch
DATA_PARALLEL: list[tuple[dict[str, Any], int, int]] = [
    ({"pattern": "*-M-*M", "dtype": "bf16", "dropout": 0.1, "microbatches": 2}, 0, 1),
    ({"pattern": "MM-*M", "positions": "none", "evaluates": True, "dropout": 0.1}, 0, 1),
    ({"pattern": "M*-M", "holds": "layer", "sequences_later": [16, 32]}, 4, 4),
    ({"pattern": "M*-M", "holds": "model", "sequences_later": [16, 32]}, 0, 1),
    ({"pattern": "MM-", "positions": "none", "holds": None, "dropout": 0.1}, 0, 1),
    ({"pattern": "M*-E/*M/*M", **PADDED, "holds": "model", "dtype": "bf16", "evaluates": "often"}, 0, 1),
    ({"pattern": "M*-M", "holds": "model", "control": "captured_again_later", "dtype": "bf16"}, 0, 1),
    ({"pattern": "M-*M", "modules": ["attn", "mlp"], "microbatches": 2}, 2, 2),
    ({"pattern": "*EM-", "experts": 4, "modules": ["attn", "mamba", "moe_router", "moe_preprocess"]}, 3, 3),
    ({"pattern": "M*-M", "data_parallel_sharding_strategy": "optim_grads"}, 4, 4),
]
STAGES: list[tuple[dict[str, Any], int]] = [
    ({"pattern": "*-|M*", "holds": "layer", "dropout": 0.1}, 8),
    ({"pattern": "*|-|M-|*M", "virtual": 2, "holds": "layer", "evaluates": True}, 12),
    ({"pattern": "*|-|M-|*M", "virtual": 2, "holds": "model", "dropout": 0.1}, 0),
]
BETWEEN = {"tied": False, "microbatches": 4}


@pytest.mark.parametrize(("case", "graphs", "pieces"), mostly_long(DATA_PARALLEL, DATA_PARALLEL[5]))
def test_graphs_are_bit_identical_to_eager(trained, case, graphs, pieces):
    result = trained(SIZES | case)
    assert_as_eager(result)
    assert result["graphs"] == graphs
    assert result["replays"] == 2 * pieces * case.get("microbatches", 1)
    layers = graphs or len(case["pattern"].replace("/", ""))
    assert result["evaluation_replays"] == replays_of_evaluations(SIZES | case, layers)


@pytest.mark.long
@pytest.mark.parametrize(("case", "graphs"), STAGES)
def test_graphs_of_pipeline_stages_are_bit_identical_to_eager(trained, case, graphs):
    result = trained(SIZES | BETWEEN | case, "--pp", "2")
    assert_as_eager(result)
    assert result["graphs"] == graphs
    if not graphs:  # chunks are captured, not layers
        assert result["replays"] == 2 * case["virtual"] * BETWEEN["microbatches"]


@pytest.mark.long
def test_dead_replay_changes_the_loss(trained):
    assert_differs_from(trained(SIZES | {"pattern": "M*-M", "control": "dead_replay"}), 3)
