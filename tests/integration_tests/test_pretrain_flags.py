"""Test that graphs are bit-identical to eager with flags of ``examples/pretrain_gpt.py`` under Megatron-FSDP."""

import pytest

from tests.support.pretraining.pairs import heterogeneous_layers
from tests.support.pretraining.pretrain import numbers, pretrain

STEPS = 6

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def heterogeneous(tmp_path_factory):
    """Return flags for four layers; the second has no attention, the third no MLP."""

    path = tmp_path_factory.mktemp("heterogeneous") / "layers.json"
    path.write_text(heterogeneous_layers())
    return f"""
        --train-iters {STEPS} --no-bias-swiglu-fusion
        --heterogeneous-layers-config-path {path} --num-layers 4 --swiglu --normalization RMSNorm
        --group-query-attention --num-query-groups 2 --position-embedding-type rope --use-rotary-position-embeddings
        --use-rope-scaling --rope-scaling-factor 8.0 --untie-embeddings-and-output-weights --disable-bias-linear
    """


@pytest.fixture(scope="module")
def eager(heterogeneous, tmp_path_factory):
    return pretrain(tmp_path_factory.mktemp("eager") / "run", heterogeneous, graphs=False)


@pytest.mark.parametrize(("modules", "graphs"), [("", 1), ("--cuda-graph-modules attn", 3)], ids=["whole", "attn"])
def test_heterogeneous_layers_are_bit_identical_to_eager(heterogeneous, eager, tmp_path, modules, graphs):
    found = pretrain(tmp_path / "run", f"{heterogeneous} --cuda-graph-warmup-steps 2 {modules}", graphs=True)
    assert len(eager) == STEPS
    assert numbers(found) == numbers(eager)
    assert [step["graphs"] for step in found] == [0] * 2 + [graphs] * (STEPS - 2)


CHUNKS = f"""
    --train-iters {STEPS} --cuda-graph-warmup-steps 2 --eval-iters 1 --eval-interval 2
    --pipeline-model-parallel-size 2 --num-layers 8 --num-layers-per-virtual-pipeline-stage 2
    --untie-embeddings-and-output-weights
"""


@pytest.fixture(scope="module")
def chunks_eagerly(tmp_path_factory):
    return pretrain(tmp_path_factory.mktemp("chunks") / "eager", CHUNKS, graphs=False)


@pytest.mark.parametrize(
    ("held", "graphs"),
    [  # per micro-batch, with two chunks or four layers
        ("", 4 * 2),
        ("--cuda-graph-layers-per-graph 1", 4 * 4),
        ("--cuda-graph-modules attn", 4 * 4),
    ],
    ids=["chunks", "layers", "attn"],
)
def test_chunks_without_a_mask_are_bit_identical_to_eager(chunks_eagerly, tmp_path, held, graphs):
    """Only the first and last chunks of a model read batches; the others get no mask."""
    found = pretrain(tmp_path / "graphed", f"{CHUNKS} {held}", graphs=True)
    assert len(chunks_eagerly) == STEPS
    assert numbers(found) == numbers(chunks_eagerly)
    assert [step["graphs"] for step in found] == [0] * 2 + [graphs] * (STEPS - 2)


@pytest.fixture(scope="module")
def one_group(tmp_path_factory):
    return pretrain(tmp_path_factory.mktemp("one-group") / "run", f"--train-iters {STEPS}", graphs=False)


@pytest.mark.parametrize("graphs", [False, True], ids=["eagerly", "graphs"])
def test_all_gather_group_changes_no_bit(one_group, tmp_path, graphs):
    flags = f"--train-iters {STEPS} --cuda-graph-warmup-steps 2 --create-all-gather-group"
    found = pretrain(tmp_path / "run", flags, graphs=graphs)
    assert len(one_group) == STEPS
    assert numbers(found) == numbers(one_group)
    assert [step["graphs"] for step in found] == [0] * 2 + [int(graphs)] * (STEPS - 2)
