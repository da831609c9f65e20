"""Test that training with any pair of supported flags is bit-identical to eager, and that ``plan`` accepts every pair.

Each run combines as many pairs as possible.
"""

import pytest

from tests.support.pretraining import pairs
from tests.support.ranks.on_cpu_backend import on_cpu_backend


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        pytest.param(*each, id=f"{number}", marks=() if number in pairs.QUICK else pytest.mark.long)
        for number, each in enumerate(pairs.stored())
    ],
)
def test_set_of_features_is_bit_identical_to_eager(names, ranks, tmp_path):
    print(f"with {', '.join(names)} on {ranks} ranks")
    pairs.assert_as_eager(names, ranks, tmp_path)
    from megatron_fsdp_cuda_graphs.plan import command

    with on_cpu_backend():
        assert command.plan(["--world-size", str(ranks), *pairs.planned(names)]) == 0
