"""Every two rows of the flag table that work, together: bit for bit as eagerly, and ``plan`` says that they fit.

As many pairs as possible are in a training. ``python -m tests.support.pairs`` writes the sets anew. ``make test`` has
those sets that together have every row.
"""

import pytest

from tests.support import pairs
from tests.support.on_cpu_backend import on_cpu_backend

SETS = pairs.stored()
QUICK = pairs.covering(SETS)


def test_the_quick_sets_have_every_feature():
    assert set(pairs.FEATURES) == {name for number in QUICK for name in SETS[number][0]}
    assert len(QUICK) < 12


@pytest.mark.long
def test_the_stored_sets_have_every_pair_that_fits_together():
    with on_cpu_backend():
        assert [names for names, _ in SETS] == pairs.sample()


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        pytest.param(*each, id=f"{number}", marks=() if number in QUICK else pytest.mark.long)
        for number, each in enumerate(SETS)
    ],
)
def test_a_set_trains_bit_for_bit_as_eager_and_is_planned(names, ranks, tmp_path, capsys):
    print(f"with {', '.join(names)} on {ranks} ranks")
    pairs.assert_as_eager(names, ranks, tmp_path)
    from megatron_fsdp_cuda_graphs.plan import command

    with on_cpu_backend():
        assert command.plan(["--world-size", str(ranks), *pairs.planned(names)]) == 0
