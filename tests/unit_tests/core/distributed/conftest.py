"""Run all tests of this folder on the CPU backend and a side stream."""

import pytest

from tests.support.ranks.rank_fixtures import (
    cpu_backend_of_module,
    four_ranks,
    hybrid_ranks,
    instances_of_one_rank,
    one_rank,
    ranks,
    side_stream,
)

__all__ = [
    "cpu_backend_of_module",
    "four_ranks",
    "hybrid_ranks",
    "instances_of_one_rank",
    "one_rank",
    "ranks",
    "side_stream",
]


@pytest.fixture(autouse=True, scope="module")
def _cpu_backend(cpu_backend_of_module):
    """Enable the CPU backend before the module's other fixtures."""


@pytest.fixture(autouse=True)
def _side_stream(side_stream):
    """Use a side stream in every test."""
