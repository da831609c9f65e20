"""What the results of ``compare_runs.py`` say."""

from collections.abc import Sequence
from typing import Any

from .launch import name_of


def by_name(cases: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the result of each case by its name."""
    return {name_of(case): result for case, result in zip(cases, results, strict=True)}


def assert_as_eager(result: dict[str, Any]) -> None:
    """Nothing failed, and nothing differs from eager training."""
    assert not result["error"], result["error"]
    assert not result["differences"], result["differences"]


def assert_went_on_eagerly(result: dict[str, Any]) -> None:
    """After its failed capture the model was trained on without graphs."""
    assert_as_eager(result)
    assert (result["graphs"], result["replays"]) == (0, 0)


def assert_differs_from(result: dict[str, Any], step: int) -> None:
    """The loss of ``step`` is the first that differs from eager training, on some rank."""
    differences = result["differences"]
    assert any(f"losses[{step}]" in line for line in differences), differences
    assert not any(f"losses[{step - 1}]" in line for line in differences), differences
