"""Test backward passes that follow a mix of replayed and eager forward passes, on two ranks."""

import json

import pytest

from tests.support.ranks.run_ranks import lines_of, on_two_ranks
from tests.support.sample import asked, each_once
from tests.unit_tests.core.distributed.kinds_of_passes import PASSES, SCOPES

from . import ranks_kinds_of_passes


@pytest.fixture(scope="module")
def two_ranks(request):
    launch = on_two_ranks(ranks_kinds_of_passes.__file__, json.dumps(asked(request, "of", "passes")))
    return {(line["scope"], line["passes"]): line["ranks"] for line in lines_of(launch)}


@pytest.mark.parametrize(("passes", "of"), each_once(PASSES, SCOPES))
def test_backward_pass_replays_only_if_its_forward_pass_did(two_ranks, of, passes):
    assert two_ranks[of, passes] == [0, 0]
