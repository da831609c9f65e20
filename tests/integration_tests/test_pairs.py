"""Every two rows of the flag table that work, together: bit for bit as eagerly, and ``plan`` says that they fit.

As many pairs as possible are in a training. ``python -m tests.support.pairs`` writes the sets anew.
"""

import pytest

from tests.support import pairs
from tests.support.on_cpu_backend import on_cpu_backend


@pytest.mark.long
def test_the_stored_sets_have_every_pair_that_fits_together():
    with on_cpu_backend():
        assert [names for names, _ in pairs.stored()] == pairs.sample()


@pytest.mark.long
@pytest.mark.parametrize(("names", "ranks"), pairs.stored(), ids=map(str, range(len(pairs.stored()))))
def test_a_set_trains_bit_for_bit_as_eager_and_is_planned(names, ranks, tmp_path, capsys):
    print(f"with {', '.join(names)} on {ranks} ranks")
    pairs.assert_as_eager(names, ranks, tmp_path)
    from megatron_fsdp_cuda_graphs.launch_plan import plan

    with on_cpu_backend():
        assert plan.main(["--world-size", str(ranks), *pairs.planned(names)]) == 0
