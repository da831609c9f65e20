"""Check the results of ``compare_runs.py``."""

from collections.abc import Mapping
from typing import Any

from tests.support.trainings.case import EVALUATION, Case

ALL_SHARDED = "optim_grads_params"


def assert_as_eager(result: dict[str, Any]) -> None:
    """Assert that training succeeded and is bit-identical to eager."""
    assert not result["error"], result["error"]
    assert not result["differences"], result["differences"]


def assert_went_on_eagerly(result: dict[str, Any]) -> None:
    """Assert that training continued eagerly after a failed capture."""
    assert_as_eager(result)
    assert (result["graphs"], result["replays"]) == (0, 0)


def assert_differs_from(result: dict[str, Any], step: int) -> None:
    """Assert that the loss of ``step`` differs from eager on at least one rank, and the loss before it on no rank."""
    differences = result["differences"]
    assert any(f"losses[{step}]" in line for line in differences), differences
    assert not any(f"losses[{step - 1}]" in line for line in differences), differences


def captures_model(values: Mapping[str, Any]) -> bool:
    """Return whether graphs hold the whole model, given arguments of ``Case.of``; ``control`` is ignored."""
    case = Case.of({name: value for name, value in values.items() if name != "control"})
    sharded = case.wrapper == "fsdp" and case.get("data_parallel_sharding_strategy", ALL_SHARDED) == ALL_SHARDED
    return sharded and case.model == "gpt" and case.holds != "layer" and not case.modules


def replays_of_evaluations(values: Mapping[str, Any], layers: int) -> list[int]:
    """Return the expected number of graph replays in each evaluation.

    Args:
        values: Arguments of ``Case.of``; ``control`` is ignored.
        layers: 0 if evaluation runs eagerly although the whole model is captured, otherwise any other number.
    """
    case = Case.of({name: value for name, value in values.items() if name != "control"})
    replays = (captures_model(values) and bool(layers)) * case.microbatches_of(EVALUATION)
    if case.evaluates == "often":
        return [0] * (case.warmup + 1) + [replays] * (case.steps - case.warmup + 1)
    return [replays] if case.evaluates else []
