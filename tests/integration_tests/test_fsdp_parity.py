"""Test that our ``MegatronFSDP`` trains a GPT bit-identically to megatron-core's, on two ranks."""

import json
import math

import pytest

from tests.support.ranks.run_ranks import lines_of, on_two_ranks
from tests.support.sample import asked, mostly_long

from . import ranks_fsdp_parity
from .ranks_fsdp_parity import VARIANTS

QUICK = ("fine-grained hooks", "experts", "delayed weight gradients", "hybrid, sharded outside too")


@pytest.fixture(scope="module")
def results(request):
    names = json.dumps([name for (name,) in asked(request, "name")])
    launch = on_two_ranks(ranks_fsdp_parity.__file__, names)
    return {line["variant"]: line["ranks"] for line in lines_of(launch)}


@pytest.mark.parametrize("name", mostly_long(VARIANTS, *QUICK))
def test_training_is_bit_identical(results, name):
    for rank in results[name]:
        assert "error" not in rank, rank["error"]
        assert rank["differences"] == []
        assert len(rank["losses"]) == len({*rank["losses"]}) == VARIANTS[name].case.steps
        assert all(map(math.isfinite, rank["losses"]))
