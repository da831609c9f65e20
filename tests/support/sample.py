"""Choose the test parameters that run in ``make test``; mark all others ``long``, for ``make test-all``."""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import pytest


def name_of(case: Mapping[str, Any]) -> str:
    """Return a test id for the arguments of a case."""
    values = {key: "+".join(map(str, value)) if isinstance(value, list) else value for key, value in case.items()}
    return " ".join(f"{key}={value}" for key, value in values.items()) or "default"


def each_once(*values: Iterable[Any]) -> list[Any]:
    """Return all combinations of ``values`` for ``parametrize``; mark all but a few with each value ``long``."""
    lists = [*map(list, values)]
    kept = [tuple(each[place % len(each)] for each in lists) for place in range(max(map(len, lists)))]
    return [pytest.param(*found, marks=[] if found in kept else [pytest.mark.long]) for found in product(*lists)]


def mostly_long(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Return ``cases`` for ``parametrize``, all marked ``long`` except those in ``quick``.

    A case is one value, or a tuple with a value for each parameter name.

    Raises:
        ValueError: A quick case is not in ``cases``.
    """
    listed = [*cases]
    if absent := [case for case in quick if case not in listed]:
        raise ValueError(f"quick cases are not in the list: {absent}")
    return [
        pytest.param(
            *(values := case if isinstance(case, tuple) else (case,)),
            id=" ".join(name_of(value) if isinstance(value, Mapping) else str(value) for value in values),
            marks=[] if case in quick else [pytest.mark.long],
        )
        for case in listed
    ]


def asked(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """Return the distinct values of the parameters ``names`` in all selected tests of the requesting file."""
    found: list[tuple[Any, ...]] = []
    for item in request.session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and parameters.keys() >= {*names}:
            values = tuple(parameters[name] for name in names)
            if values not in found:
                found.append(values)
    return found
