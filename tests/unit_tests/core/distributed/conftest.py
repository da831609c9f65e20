"""Every test here runs on the CPU backend, with a stream current that is not the legacy default one."""

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
    """Before any other fixture of the module."""


@pytest.fixture(autouse=True)
def _side_stream(side_stream):
    """In every test."""
