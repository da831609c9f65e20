"""Share training runs among integration tests, and distribute the tests to workers."""

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.support.trainings.launch import compare_runs, trained

__all__ = ["compare_runs", "trained"]


class Scheduling(LoadFileScheduling):
    """Keeps tests of a file on one worker because they share runs; tests of test_pairs.py are distributed singly."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if "/test_pairs.py::" in nodeid else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    """Return the scheduler for ``--dist loadfile``."""
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None
