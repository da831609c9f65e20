"""Provide a fixture that trains all cases of a layout in one launch."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.sample import name_of
from tests.support.trainings.gpus import DETERMINISTIC, GPUS
from tests.support.trainings.launch import compare_runs

__all__ = ["compare_runs"]


@pytest.fixture(scope="session")
def together(compare_runs) -> Callable[..., dict[str, Any]]:
    """Return a function that trains cases in one launch, caches the results, and returns one of them."""
    found: dict[str, dict[str, dict[str, Any]]] = {}

    def result(
        case: dict[str, Any], cases: Sequence[dict[str, Any]], *options: str, ranks: int = GPUS, **variables: str
    ) -> dict[str, Any]:
        key = json.dumps([cases, options, ranks, variables])
        if key not in found:
            compared = compare_runs(cases, *options, ranks=ranks, environment=DETERMINISTIC | variables)
            found[key] = dict(zip(map(name_of, cases), compared, strict=True))
        return found[key][name_of(case)]

    return result
