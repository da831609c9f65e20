"""Four ranks: with instances that shard gradients among them, norms are those of one instance."""

import pytest

from tests.support.ranks.run_ranks import lines_of, on_ranks
from tests.support.trainings.rounding import ROUNDING

from . import ranks_gradient_norms


@pytest.fixture(scope="module")
def norms():
    return {line["layout"]: line for line in lines_of(on_ranks(4, ranks_gradient_norms.__file__))}


@pytest.mark.parametrize("layout", ranks_gradient_norms.LAYOUTS)
def test_norms_are_those_without_instances_on_every_rank(norms, layout):
    alone, instances = norms[layout]["alone"], norms[layout]["instances"]
    assert instances == [instances[0]] * 4
    assert instances[0] == pytest.approx(alone[0], rel=ROUNDING)
