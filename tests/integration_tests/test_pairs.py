"""Every two rows of the flag table that work, together: bit for bit as eagerly, and ``plan`` says that they fit.

As many pairs as possible are in a training. ``make test`` has
those sets that together have every row.
"""

import pytest

from tests.support.pretraining import pairs
from tests.support.ranks.on_cpu_backend import on_cpu_backend

SETS = pairs.stored()


def test_the_quick_sets_have_every_feature():
    assert {*pairs.FEATURES} == {name for number in pairs.QUICK for name in SETS[number][0]}


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        pytest.param(*each, id=f"{number}", marks=() if number in pairs.QUICK else pytest.mark.long)
        for number, each in enumerate(SETS)
    ],
)
def test_a_set_trains_bit_for_bit_as_eager_and_is_planned(names, ranks, tmp_path, capsys):
    print(f"with {', '.join(names)} on {ranks} ranks")
    pairs.assert_as_eager(names, ranks, tmp_path)
    from megatron_fsdp_cuda_graphs.plan import command

    with on_cpu_backend():
        assert command.plan(["--world-size", str(ranks), *pairs.planned(names)]) == 0
