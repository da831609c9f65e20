"""What the runs of a benchmark found so far."""

from collections.abc import Mapping, Sequence
from typing import Any

from . import report
from .plan import Run
from .spread import over_launches
from .variants import Variant

ByVariant = dict[str, dict[str, Any]]


class Results:
    """Results of runs, by configuration and variant.

    Args:
        chosen: The variants of each configuration, by its name.
    """

    def __init__(self, chosen: Mapping[str, Sequence[Variant]]):
        self._chosen = chosen
        self._timed: list[dict[str, ByVariant]] = []  # of each launch
        self._profiled: dict[str, ByVariant] = {name: {} for name in chosen}
        self._ended = 0
        self.begin_launch()

    def begin_launch(self) -> None:
        """Keep the timed runs that follow as those of another launch."""
        self._timed.append({name: {} for name in self._chosen})

    def keep(self, run: Run, result: dict[str, Any], planned: int) -> None:
        """Keep the result of ``run``, one of ``planned``, and print a line about it."""
        kept = self._profiled if run.profiled else self._timed[-1]
        kept[run.configuration][run.variant] = result
        self._ended += 1
        what = f"[{self._ended}/{planned}] {run.configuration}, {run.variant}{', profile' * run.profiled}"
        if "error" in result:
            print(f"{what}: failed\n{result['error']}", flush=True)
        elif run.profiled:
            calls = result["profile"].get("calls", {}).get("launches", "-")
            print(f"{what}: {calls} launches, {result['profile']['python_calls']} Python calls a step", flush=True)
        else:
            print(f"{what}: {result['ms']:.1f} ms, {result['left_mib']} MiB left after it", flush=True)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """What is reported, by configuration."""
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
        """Loss and gradient norm of each step of the first launch's timed runs, by configuration and variant."""
        return {
            name: {variant: result.get("numbers") for variant, result in results.items()}
            for name, results in self._timed[0].items()
        }
