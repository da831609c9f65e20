"""Fixtures of the integration tests, and which of these go to one worker."""

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.support.trainings.launch import compare_runs

__all__ = ["compare_runs"]


class Scheduling(LoadFileScheduling):
    """Keeps the tests of a file together, which share trainings. Sets of pairs share none, and each takes long."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if "/test_pairs.py::" in nodeid else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    """Return it for `--dist loadfile`."""
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None
