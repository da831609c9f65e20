"""How often evaluations of a case replay graphs."""

from collections.abc import Mapping
from typing import Any

from tests.support.trainings.case import EVALUATION, Case


def replays_of_evaluations(case: Mapping[str, Any], layers: int) -> list[int]:
    """Return for each evaluation of a case how often its graph is replayed, once there are graphs.

    Args:
        case: Keyword arguments of ``Case``, and perhaps ``control``.
        layers: 0 where evaluation runs eagerly, as it does wherever graphs hold less than the whole model.
    """
    full = Case(**{key: value for key, value in case.items() if key != "control"})
    whole = full.holds in (None, "model")
    replays = (whole and bool(layers)) * full.microbatches_of(EVALUATION)
    if full.evaluates_often:
        return [0] * (full.warmup + 1) + [replays] * (full.steps - full.warmup + 1)
    return [replays] if full.evaluates else []
