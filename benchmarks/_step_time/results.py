"""What the runs of a benchmark found so far."""

from collections.abc import Mapping, Sequence
from typing import Any

from . import report
from .plan import Run
from .variants import Variant


class Results:
    """Results of runs, by configuration and variant.

    Args:
        chosen: The variants of each configuration, by its name.
    """

    def __init__(self, chosen: Mapping[str, Sequence[Variant]]):
        self._chosen = chosen
        self._found: dict[bool, dict[str, dict[str, Any]]] = {
            profiled: {name: {} for name in chosen} for profiled in (False, True)
        }

    def keep(self, run: Run, result: dict[str, Any], planned: int) -> None:
        """Keep the result of ``run``, one of ``planned``, and print a line about it."""
        self._found[run.profiled][run.configuration][run.variant] = result
        what = f"[{run.number + 1}/{planned}] {run.configuration}, {run.variant}{', profile' * run.profiled}"
        if "error" in result:
            print(f"{what}: failed\n{result['error']}", flush=True)
        elif run.profiled:
            calls = result["profile"].get("calls", {}).get("launches", "-")
            print(f"{what}: {calls} launches, {result['profile']['python_calls']} Python calls a step", flush=True)
        else:
            print(f"{what}: {result['ms']:.1f} ms, {result['left_mib']} MiB left after it", flush=True)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """What is reported, by configuration."""
        return {
            name: report.rows(variants, self._found[False][name], self._found[True][name])
            for name, variants in self._chosen.items()
        }

    def numbers(self) -> dict[str, dict[str, Any]]:
        """Loss and gradient norm of each step of the timed runs, by configuration and variant."""
        return {
            name: {variant: result.get("numbers") for variant, result in results.items()}
            for name, results in self._found[False].items()
        }
