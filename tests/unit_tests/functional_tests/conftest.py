"""Fixtures that make cases and results."""

from pathlib import Path
from typing import Any

import pytest

from tests.functional_tests._runner.case import Case
from tests.functional_tests._runner.trainings import Found


@pytest.fixture
def make_case(tmp_path):
    """Return a function that makes a graphed case of 3 steps."""

    def make(name: str = "gpt/graphed", **other) -> Case:
        attributes: dict[str, Any] = {
            "name": name,
            "folder": Path(tmp_path) / name,
            "resumes": False,
            "ranks": 2,
            "on_cpu": False,
            "needs": (),
            "python_path": (),
            "environment": {},
            "arguments": {"--train-iters": 3, "--cuda-graph-impl": "transformer_engine"},
            "equals": "gpt/eager",
            "bounds": {"ms": 2.0},
        }
        return Case(**attributes | other)

    return make


@pytest.fixture
def make_found():
    """Return a function that makes the results of 3 steps."""

    def make(*losses: float, **other) -> Found:
        values = [loss.hex() for loss in losses or (3.0, 2.5, 2.0)]
        attributes: dict[str, Any] = {
            "losses": values,
            "norms": [(1.5).hex()] * len(values),
            "evaluations": [(2.25).hex()],
            "graphs": 2,
            "measured": {"ms": 10.0, "max_allocated_mib": 100.0, "max_reserved_mib": 200.0},
        }
        return Found(**attributes | other)

    return make
