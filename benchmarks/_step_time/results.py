"""Collect the results of runs."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from . import report
from .plan import Run
from .variants import Variant

ByVariant = dict[str, dict[str, Any]]
Row = Mapping[str, Any]
MEASURED = (
    *("ms", "ratio_to_full_iteration", "ratio_to_eager", "ratio_to_compute_alone", "ratio_to_compute"),
    *("tokens_per_second", "tflops", "capture_seconds"),
)


class Results:
    """Results of runs, by configuration and variant.

    Args:
        chosen: Variants by configuration name.
    """

    def __init__(self, chosen: Mapping[str, Sequence[Variant]]):
        self._chosen = chosen
        self._timed: list[dict[str, ByVariant]] = []  # per launch
        self._profiled: dict[str, ByVariant] = {name: {} for name in chosen}
        self._ended = 0
        self.begin_launch()

    def begin_launch(self) -> None:
        """Assign subsequent timed runs to a new launch."""
        self._timed.append({name: {} for name in self._chosen})

    def keep(self, run: Run, result: dict[str, Any], planned: int) -> None:
        """Store and print the result of ``run``; ``planned`` is the total number of runs."""
        kept = self._profiled if run.profiled else self._timed[-1]
        kept[run.configuration][run.variant] = result
        self._ended += 1
        what = f"[{self._ended}/{planned}] {run.configuration}, {run.variant}{', profile' * run.profiled}"
        if "error" in result:
            print(f"{what}: failed\n{result['error']}", flush=True)
        elif run.profiled:
            calls = result["profile"].get("calls", {}).get("launches", "-")
            print(f"{what}: {calls} launches, {result['profile']['python_calls']} Python calls per step", flush=True)
        else:
            print(f"{what}: {result['ms']:.1f} ms, {result['left_mib']} MiB still allocated", flush=True)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of each configuration."""
        return {name: self._rows(name, variants) for name, variants in self._chosen.items()}

    def _rows(self, name: str, variants: Sequence[Variant]) -> list[dict[str, Any]]:
        launches = [
            report.rows(variants, timed[name], self._profiled[name] if number == 0 else {})
            for number, timed in enumerate(self._timed)
        ]
        by_variant: dict[str, list[dict[str, Any]]] = {each.name: [] for each in variants}
        for row in (row for rows in launches for row in rows):
            by_variant[row["variant"]].append(row)
        return [over_launches(rows) for rows in by_variant.values() if rows]

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Return the loss and gradient norm of each step of the first launch, by configuration and variant."""
        return {
            name: {variant: result.get("numbers") for variant, result in results.items()}
            for name, results in self._timed[0].items()
        }


def over_launches(rows: Sequence[Row]) -> dict[str, Any]:
    """Combine the rows of a variant from several launches.

    Args:
        rows: One row of ``report.rows`` per launch.

    Returns:
        The row of a failed launch if there is one. Otherwise a copy of the first row with medians over launches, the
        minimum of ``equal_steps``, and, as ``launches``, the measurements of each launch.
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
