"""Test that collectives written for NCCL work on the CPU backend with two ranks."""

import pytest

from tests.support.ranks.run_ranks import on_two_ranks

from . import ranks_collectives
from .ranks_collectives import CASES


@pytest.fixture(scope="module")
def output():
    """Return the output of ``ranks_collectives.py``, which stops at the first failing case."""
    return on_two_ranks(ranks_collectives.__file__).stdout


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_collective_works_on_two_ranks(output, case):
    assert f"passed: {case}\n" in output, output[-3000:]
