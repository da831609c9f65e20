"""Part of all combinations for ``make test``; the others are marked ``long``, and ``make test-all`` runs them too."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def each_once(*values: Iterable[Any]) -> list[Any]:
    """Return all combinations for ``parametrize``, marked so that each value is in one that is not ``long``."""
    lists = [*map(list, values)]
    kept = [tuple(each[place % len(each)] for each in lists) for place in range(max(map(len, lists)))]
    return [pytest.param(*found, marks=[] if found in kept else [pytest.mark.long]) for found in product(*lists)]


def mostly_long(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Return cases for ``parametrize``, ``long`` but for the quick ones; a tuple has the values of several names.

    Raises:
        ValueError: a quick one is no case.
    """
    listed = [*cases]
    if absent := [case for case in quick if case not in listed]:
        raise ValueError(f"no cases: {absent}")
    values = (case if isinstance(case, tuple) else (case,) for case in listed)
    return [
        pytest.param(*each, marks=[] if case in quick else [pytest.mark.long])
        for case, each in zip(listed, values, strict=True)
    ]


def asked(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """Return the values of parameters in the tests of a fixture's file that this session runs, in their order."""
    found: list[tuple[Any, ...]] = []
    for item in request.session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and parameters.keys() >= {*names}:
            values = tuple(parameters[name] for name in names)
            if values not in found:
                found.append(values)
    return found
