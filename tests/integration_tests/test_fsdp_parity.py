"""A GPT trains under our ``MegatronFSDP`` bit for bit as under megatron-core's own, on two ranks.

Compared are the loss and the gradient norm of every step and every parameter shard that the optimizer owns. One launch
trains all variants.
"""

import math

import pytest

from tests.support.ranks.run_ranks import lines_of, on_two_ranks

from . import ranks_fsdp_parity
from .parity_variants import VARIANTS


@pytest.fixture(scope="module")
def launch():
    return on_two_ranks(ranks_fsdp_parity.__file__)


@pytest.fixture(scope="module")
def results(launch):
    return {line["variant"]: line["ranks"] for line in lines_of(launch)}


@pytest.mark.parametrize("name", VARIANTS)
def test_training_is_bit_equal(launch, results, name):
    assert name in results, launch.stderr[-3000:]
    for rank in results[name]:
        assert "error" not in rank, rank["error"]
        assert rank["differences"] == []
        assert len(rank["losses"]) == VARIANTS[name].case.steps
        assert all(map(math.isfinite, rank["losses"]))


def test_the_comparison_sees_training(results):
    losses = results["optim_grads_params, fp32, 1 micro-batches"][0]["losses"]
    assert len(set(losses)) == len(losses)
