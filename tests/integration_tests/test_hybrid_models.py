"""``HybridModel`` under Megatron-FSDP with a graph per layer trains bit for bit as it does eagerly, on two CPU ranks.

Patterns: ``*`` attention, ``-`` MLP, ``E`` MoE, ``M`` Mamba with a small mixer in the place of ``mamba-ssm``'s, ``/``
before each depth of multi-token prediction, ``|`` between pipeline stages.
"""

from typing import Any

import pytest

from tests.support.pretraining.pretrain import numbers, pretrain
from tests.support.sample import mostly_long
from tests.support.trainings.compared import Trained, assert_as_eager, assert_differs_from
from tests.support.trainings.evaluations import replays_of_evaluations
from tests.support.trainings.launch import name_of

SIZES: dict[str, Any] = {"steps": 8}
PADDED = {"experts": 4, "capacity": 1.0}
# With each case: layers in graphs, and forward graphs that are replayed in a micro-batch.
DATA_PARALLEL: list[tuple[dict[str, Any], int, int]] = [
    ({"pattern": "*-*-"}, 4, 1),
    ({"pattern": "*-M-*M", "dtype": "bf16", "dropout": 0.1, "microbatches": 2}, 6, 1),
    ({"pattern": "MM-*M", "positions": "none", "evaluates": True, "dropout": 0.1}, 5, 1),
    ({"pattern": "M*-M", "holds": "layer", "sequences_later": [16, 32]}, 4, 4),
    ({"pattern": "M*-M", "dropout": 0.1}, 4, 1),
    ({"pattern": "M*-M", "holds": "model", "sequences_later": [16, 32]}, 0, 1),
    ({"pattern": "MM-", "positions": "none", "holds": None, "dropout": 0.1}, 0, 1),
    ({"pattern": "M*-E/*M/*M", **PADDED, "holds": "model", "dtype": "bf16", "evaluates_often": True}, 0, 1),
    ({"pattern": "*-M-*M", "holds": None, "dropout": 0.1, "microbatches": 2, "evaluates": True}, 0, 1),
    ({"pattern": "M*-M", "holds": "model", "control": "captured_again_later", "dtype": "bf16"}, 0, 1),
    ({"pattern": "M-*M", "modules": ["mamba"], "dropout": 0.1}, 2, 2),
    ({"pattern": "M-*M", "modules": ["attn", "mlp"], "microbatches": 2}, 2, 2),
    ({"pattern": "*EM-", "experts": 4, "modules": ["attn", "mamba", "moe_router", "moe_preprocess"]}, 3, 3),
    ({"pattern": "*EM-", **PADDED, "dtype": "bf16", "dropout": 0.1, "microbatches": 2}, 4, 1),
    ({"pattern": "M*/*M", "dropout": 0.1}, 4, 3),
    ({"pattern": "M*-E/*M/*M", **PADDED, "dtype": "bf16", "microbatches": 2, "evaluates": True}, 8, 5),
    ({"pattern": "M*-M", "strategy": "optim_grads"}, 4, 4),
    ({"pattern": "M*-M", "dtype": "bf16", "optimizer_graph": True, "control": "captured_again_later"}, 4, 1),
]
STAGES: list[tuple[dict[str, Any], int]] = [
    ({"pattern": "*-|M*", "dropout": 0.1}, 8),
    ({"pattern": "*|-|M-|*M", "virtual": 2, "evaluates": True}, 12),
    ({"pattern": "*|-|M-|*M", "virtual": 2, "holds": "model", "dropout": 0.1}, 0),
]
BETWEEN = {"tied": False, "microbatches": 4}


@pytest.fixture(scope="module")
def results(compare_runs):
    """The result of each case on data-parallel ranks, by its name."""
    cases = [case for case, *_ in DATA_PARALLEL] + [{"pattern": "M*-M", "control": "dead_replay"}]
    return Trained(cases, compare_runs, SIZES)


@pytest.fixture(scope="module")
def stages(compare_runs):
    """The result of each case with two pipeline stages, by its name."""
    return Trained([case for case, _ in STAGES], compare_runs, SIZES | BETWEEN, "--pp", "2")


def assert_equal(result):
    assert_as_eager(result)
    assert len(result["losses"]) == SIZES["steps"]


@pytest.mark.parametrize(
    ("case", "graphs", "pieces"),
    mostly_long(DATA_PARALLEL, DATA_PARALLEL[7], DATA_PARALLEL[12]),
    ids=[name_of(case) for case, *_ in DATA_PARALLEL],
)
def test_a_hybrid_model_trains_bit_for_bit_as_eager(results, case, graphs, pieces):
    result = results[name_of(case)]
    assert_equal(result)
    assert result["graphs"] == graphs
    assert result["replays"] == 2 * pieces * case.get("microbatches", 1)
    layers = graphs or len(case["pattern"].replace("/", ""))
    assert result["evaluation_replays"] == replays_of_evaluations(SIZES | case, layers)


@pytest.mark.parametrize(("case", "graphs"), mostly_long(STAGES, STAGES[-1]), ids=[name_of(case) for case, _ in STAGES])
def test_pipeline_stages_of_a_hybrid_model_train_bit_for_bit_as_eager(stages, case, graphs):
    result = stages[name_of(case)]
    assert_equal(result)
    assert result["graphs"] == graphs
    if not graphs:  # of layers
        assert result["replays"] == 2 * case["virtual"] * BETWEEN["microbatches"]


def test_a_replay_that_does_nothing_changes_the_loss(results):
    assert_differs_from(results["pattern=M*-M control=dead_replay"], 3)


@pytest.mark.long
def test_pretraining_by_flags_is_bit_equal_to_eager(tmp_path):
    flags = """
        --train-iters 6 --hybrid-layer-pattern M-*M --spec tests.support.layers.hybrid_spec local
        --untie-embeddings-and-output-weights --cuda-graph-warmup-steps 2 --eval-iters 1 --eval-interval 4
    """
    eager = pretrain(tmp_path / "eager", flags, graphs=False)
    graphed = pretrain(tmp_path / "graphed", flags, graphs=True)
    assert len(eager) == 6
    assert numbers(graphed) == numbers(eager)
    assert [step["graphs"] for step in graphed] == [0] * 2 + [1] * 4  # of all layers
