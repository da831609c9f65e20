"""Two ranks: every micro-batch of a step counts alike, also where a rank has gradients whole that others shard."""

import pytest

from tests.support.ranks.run_ranks import lines_of, on_two_ranks
from tests.support.trainings.rounding import ROUNDING

from . import ranks_unsharded_gradients
from .ranks_unsharded_gradients import AVERAGING, LAYOUTS, OVERWRITTEN, REFUSED_WITH_GRAPHS


@pytest.fixture(scope="module")
def launch():
    return on_two_ranks(ranks_unsharded_gradients.__file__)


@pytest.fixture(scope="module")
def results(launch):
    return {line["layout"]: line["ranks"] for line in lines_of(launch)}


@pytest.fixture
def ranks_of(launch, results):
    def ranks_of(layout):
        assert layout in results, launch.stderr[-3000:]
        for rank in results[layout]:
            assert "error" not in rank, rank["error"]
        return results[layout]

    return ranks_of


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != OVERWRITTEN])
def test_equal_micro_batches_train_bit_for_bit_as_one(ranks_of, layout):
    for rank in ranks_of(layout):
        assert rank["differences"] == []
        assert len(set(rank["grad_norms"])) == len(rank["grad_norms"]) > 1


def test_with_nothing_sharded_megatrons_own_fused_kernels_keep_the_last_micro_batch_only(ranks_of):
    """A known fault of megatron-core, which docs/limits.md names."""
    for rank in ranks_of(OVERWRITTEN):
        assert rank["differences"] != []


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in REFUSED_WITH_GRAPHS])
def test_graphs_train_bit_for_bit_as_eager(ranks_of, layout):
    for rank in ranks_of(layout):
        assert rank["of graphs"] == []
        assert rank["replays"] > 0


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_the_norm_is_that_of_gradients_of_one_instance(ranks_of, outer):
    (expected, *_) = ranks_of("two shards")
    for rank in ranks_of(f"two instances, {outer}"):
        assert rank["grad_norms"] == pytest.approx(expected["grad_norms"], rel=ROUNDING)


def test_the_norm_counts_the_experts_of_all_ranks_where_nothing_is_sharded(ranks_of):
    (expected, *_) = ranks_of("experts of each rank")
    for rank in ranks_of("experts of each rank, nothing sharded"):
        assert rank["grad_norms"] == pytest.approx(expected["grad_norms"], rel=ROUNDING)


@pytest.mark.parametrize("layout", AVERAGING)
def test_averages_of_the_collective_are_sums_of_scaled_gradients(ranks_of, layout):
    """Of two ranks bit for bit; the norm counts experts too, which fewer ranks have than contribute to them."""
    for averaged, scaled in zip(ranks_of(f"{layout}, averaged"), ranks_of(layout), strict=True):
        assert averaged["grad_norms"] == scaled["grad_norms"]
