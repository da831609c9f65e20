"""Rows of several launches of the same variants, made one: on shared hosts one launch differs from the next."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Row = Mapping[str, Any]
MEASURED = (
    *("ms", "ratio_to_full_iteration", "ratio_to_eager", "ratio_to_compute_alone", "ratio_to_compute"),
    "capture_seconds",
)


def over_launches(rows: Sequence[Row]) -> dict[str, Any]:
    """Return one row for those of a variant in each launch.

    Args:
        rows: As of ``report.rows``, of at least one launch; each ratio is to a run of the same launch.

    Returns:
        The first row, with the medians over all launches of what is measured, and what each launch measured under
        ``launches``. ``equal_steps`` is the least. If a run failed, its row.
    """
    failed = next((row for row in rows if "error" in row), None)
    if failed is not None or len(rows) == 1:
        return dict(failed or rows[0])
    measured = {key: [row[key] for row in rows if row.get(key) is not None] for key in MEASURED}
    equal = [row["equal_steps"] for row in rows if row.get("equal_steps") is not None]
    return {
        **rows[0],
        **{key: round(median(values), 3) if values else None for key, values in measured.items()},
        "equal_steps": min(equal, default=None),
        "launches": [{key: row.get(key) for key in MEASURED} for row in rows],
    }


def sentence(row: Row) -> str:
    """Say between which ratios the launches of a row lie; empty where there is one launch, or nothing to compare."""
    for key, other in (("ratio_to_full_iteration", "the full iteration"), ("ratio_to_eager", "eager")):
        ratios = [launch[key] for launch in row.get("launches", ()) if launch[key] is not None]
        if ratios and set(ratios) != {1.0}:
            return f"{row['variant']}: {min(ratios):.3f} to {max(ratios):.3f} of {other} in {len(ratios)} launches"
    return ""
