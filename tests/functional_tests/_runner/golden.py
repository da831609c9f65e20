"""Golden values: scalars of a recipe by iteration, in Megatron-LM's format."""

import json
import statistics
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.support.trainings.rounding import ROUNDING

from .recipe import CPU_BACKEND, TESTS, Recipe

Metrics = dict[str, dict[int, float]]  # values by metric and iteration

NUMBERS = ("lm loss", "grad-norm", "num-zeros", "lm loss validation")
# Maximum ratio of a median to the golden one. Hosts differ, and most of an eager step is host time.
BOUNDS = {"iteration-time": 2.0, "mem-allocated-bytes": 1.2, "mem-max-allocated-bytes": 1.2}
DECISIVE = ("torch", "megatron-core", "transformer-engine")  # other versions may change bits
SHOWN = 4  # values to report per metric


def write(file: Path, metrics: Metrics) -> None:
    """Write metrics as JSON, which keeps all bits of a float."""
    golden = {}
    for name, values in metrics.items():
        steps = sorted(values)
        golden[name] = {
            "start_step": steps[0],
            "end_step": steps[-1],
            "step_interval": steps[1] - steps[0] if len(steps) > 1 else 1,
            "values": {str(step): values[step] for step in steps},
        }
    file.write_text(json.dumps(golden, indent=4) + "\n")


def read(file: Path) -> Metrics:
    """Read the metrics written by ``write``.

    Raises:
        FileNotFoundError: The file does not exist.
    """
    golden = json.loads(file.read_text())
    return {name: {int(step): value for step, value in each["values"].items()} for name, each in golden.items()}


def other_versions(recipe: Recipe) -> list[str]:
    """Return one line per package whose installed version differs from ``constraints.txt``."""
    lines = (TESTS.parent / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    packages = DECISIVE[:-1] if recipe.platform == CPU_BACKEND else DECISIVE
    return [
        f"{name} {installed}, constraints.txt {pinned[name]}"
        for name in packages
        if (installed := _installed(name)) != pinned[name]
    ]


def _installed(package: str) -> str | None:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def differences(found: Metrics, expected: Metrics, rounding: float = 0.0) -> list[str]:
    """Compare the ``NUMBERS`` metrics present in ``expected``.

    Return one line per difference, at most ``SHOWN`` per metric, then a count of the rest.

    Args:
        found, expected: Metrics to compare.
        rounding: Relative tolerance. On CPUs, rounding depends on the processor and the number of threads.
    """
    lines: list[str] = []
    for name in NUMBERS:
        if name not in expected:
            continue
        values, others = found.get(name, {}), expected[name]
        wrong = [step for step in sorted(values | others) if not _equal(values.get(step), others.get(step), rounding)]
        lines += [f"{name} {step}: {values.get(step)}, expected {others.get(step)}" for step in wrong[:SHOWN]]
        lines += [f"{name}: {len(wrong) - SHOWN} more differ"] if len(wrong) > SHOWN else []
    return lines


def differences_from_golden(recipe: Recipe, found: Metrics) -> list[str]:
    """Return the differences from the recipe's golden values; on GPUs, include violations of ``BOUNDS``.

    On the CPU backend, a tolerance of ``ROUNDING`` per step covers rounding, which depends on the processor.

    Raises:
        FileNotFoundError: There are no golden values.
    """
    expected = read(recipe.golden)
    if recipe.platform == CPU_BACKEND:
        # Measured over 8 steps with 10 processor settings: losses within 2**-22.3, norms within 2**-19.3.
        return differences(found, expected, ROUNDING * recipe.steps)
    lines = differences(found, expected)
    for name in BOUNDS.keys() & expected.keys():
        now, then = (statistics.median(metrics[name].values()) for metrics in (found, expected))
        if now > then * BOUNDS[name]:
            lines.append(f"{name} {now:.4g} is more than {BOUNDS[name]} times the golden value {then:.4g}")
    return lines


def _equal(value: float | None, expected: float | None, rounding: float) -> bool:
    """Return whether the values are equal within the relative tolerance ``rounding``."""
    if value is None or expected is None:
        return value is expected
    return value == expected or abs(value - expected) <= rounding * abs(expected)
