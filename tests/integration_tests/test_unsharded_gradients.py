"""Test that micro-batches have equal weight in sharded and unsharded gradients, on two ranks."""

import json

import pytest

from tests.support.ranks.run_ranks import lines_of, on_two_ranks
from tests.support.sample import mostly_long
from tests.support.trainings.rounding import ROUNDING

from . import ranks_unsharded_gradients
from .ranks_unsharded_gradients import AVERAGING, LAYOUTS, OVERWRITTEN, REFUSED_WITH_GRAPHS


@pytest.fixture(scope="module")
def ranks_of():
    """Return a function that trains in a layout and caches the results of both ranks."""
    found = {}

    def ranks_of(layout):
        if layout not in found:
            (line,) = lines_of(on_two_ranks(ranks_unsharded_gradients.__file__, json.dumps(layout)))
            found[layout] = line["ranks"]
        for rank in found[layout]:
            assert "error" not in rank, rank["error"]
        return found[layout]

    return ranks_of


@pytest.mark.parametrize(
    "layout", mostly_long((layout for layout in LAYOUTS if layout != OVERWRITTEN), "experts of each rank, fused")
)
def test_equal_micro_batches_train_like_one(ranks_of, layout):
    for rank in ranks_of(layout):
        assert rank["differences"] == []
        assert len(set(rank["grad_norms"])) == len(rank["grad_norms"]) > 1
        if layout not in REFUSED_WITH_GRAPHS:
            assert rank["of graphs"] == []
            assert rank["replays"] > 0


@pytest.mark.long
def test_unsharded_fused_kernels_keep_the_last_micro_batch_only(ranks_of):
    """Pin a known bug of megatron-core, listed in docs/limits.md."""
    for rank in ranks_of(OVERWRITTEN):
        assert rank["differences"] != []


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "reference"),
    [
        ("two instances, no_shard", "two shards"),
        ("two instances, optim", "two shards"),
        ("experts of each rank, nothing sharded", "experts of each rank"),
    ],
)
def test_gradient_norm_does_not_depend_on_sharding(ranks_of, layout, reference):
    (expected, *_) = ranks_of(reference)
    for rank in ranks_of(layout):
        assert rank["grad_norms"] == pytest.approx(expected["grad_norms"], rel=ROUNDING)


@pytest.mark.long
@pytest.mark.parametrize("layout", AVERAGING)
def test_averaging_collectives_equal_sums_of_scaled_gradients(ranks_of, layout):
    for averaged, scaled in zip(ranks_of(f"{layout}, averaged"), ranks_of(layout), strict=True):
        assert averaged["grad_norms"] == scaled["grad_norms"]
