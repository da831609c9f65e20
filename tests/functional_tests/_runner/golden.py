"""Golden values: results of a case on one machine, in ``golden_values_MACHINE.json`` next to the case."""

import json
import platform
from pathlib import Path
from typing import Any

from benchmarks.results_file import hardware, versions, write_results
from tests.support.trainings.rounding import ROUNDING

from .case import Case
from .trainings import Found

NUMBERS = {"lm loss": "losses", "grad-norm": "norms", "evaluation lm loss": "evaluations"}
DECISIVE = ("torch", "megatron-core", "transformer-engine")  # packages whose other versions may change bits
SHOWN = 4  # steps to report


def path(case: Case, machine: str, folder: Path | None) -> Path:
    """Return the path of the golden values of ``case`` on ``machine``, next to the case or under ``folder``."""
    return (folder / case.name if folder else case.folder) / f"golden_values_{machine}.json"


def write(file: Path, case: Case, found: Found) -> None:
    """Write the losses and norms by step, the number of graphs, and the bounded measurements."""
    file.parent.mkdir(parents=True, exist_ok=True)
    numbers = {name: _by_number(getattr(found, attribute)) for name, attribute in NUMBERS.items()}
    write_results(
        file,
        command=f"python tests/functional_tests/run.py {case.name} --record",
        gpus=case.ranks,
        architecture=platform.machine(),
        **numbers,
        graphs=found.graphs,
        measured={name: found.measured[name] for name in case.bounds},
    )


def read(file: Path) -> dict[str, Any]:
    """Read the values written by ``write``.

    Raises:
        FileNotFoundError: The file does not exist.
    """
    values: dict[str, Any] = json.loads(file.read_text())
    return values


def measured_elsewhere(golden: dict[str, Any], case: Case) -> list[str]:
    """Return the differences in hardware and versions between ``golden`` and this machine."""
    there, here = golden["versions"], versions()
    pairs = [(name, there.get(name), here.get(name)) for name in DECISIVE]
    if case.on_cpu:  # builds of torch for other versions of CUDA, or without CUDA, have the same CPU operators
        pairs = [(name, *(each and each.partition("+")[0] for each in both)) for name, *both in pairs]
    pairs += [("hardware", golden["hardware"], hardware(case.ranks))]
    pairs += [("architecture", golden["architecture"], platform.machine())]
    return [f"{name} {then}, here {now}" for name, then, now in pairs if then != now]


def differences(found: Found, golden: dict[str, Any], case: Case) -> list[str]:
    """Return the differences between ``found`` and ``golden`` in losses, norms, graphs and bounded measurements.

    On GPUs, losses and norms must be bit-identical to the golden values. On CPUs, the summation order depends on the
    processor and the number of threads, so each step has a tolerance of ``ROUNDING``. In the 8 steps of the committed
    cases, 10 combinations of 1 to 4 threads and instruction sets of torch, MKL and oneDNN differ by up to 2**-22.3 in
    losses and 2**-19.3 in norms.
    """
    lines = []
    rounding = ROUNDING * case.steps if case.on_cpu else 0.0
    for name, attribute in NUMBERS.items():
        lines += _of_steps(name, _by_number(getattr(found, attribute)), golden[name], "golden value", rounding)
    if found.graphs != golden["graphs"]:
        lines.append(f"{found.graphs} CUDA graphs, golden value {golden['graphs']}")
    for name, factor in case.bounds.items():
        now, then = found.measured[name], golden["measured"][name]
        if now > then * factor:
            lines.append(f"{name} {now:.1f} is more than {factor} times the golden value {then:.1f}")
    return lines


def differences_from(reference: Found, found: Found, name: str) -> list[str]:
    """Return the differences in losses and norms from ``reference``, the results of the case ``name``."""
    lines = []
    for kind, attribute in NUMBERS.items():
        expected = _by_number(getattr(reference, attribute))
        lines += _of_steps(kind, _by_number(getattr(found, attribute)), expected, name)
    return lines


def _by_number(values: list[str | None]) -> dict[str, str | None]:
    """Return the values keyed by their numbers from 1, as strings for JSON."""
    return {str(number): value for number, value in enumerate(values, 1)}


def _of_steps(
    name: str, found: dict[str, Any], expected: dict[str, Any], source: str, rounding: float = 0.0
) -> list[str]:
    wrong = [step for step in expected | found if not _equal(found.get(step), expected.get(step), rounding)]
    lines = [
        f"{name} {step}: {_shown(found.get(step))}, {source} {_shown(expected.get(step))}" for step in wrong[:SHOWN]
    ]
    more = len(wrong) - len(lines)
    return lines + ([f"{name}: {more} more differ"] if more else [])


def _equal(value: str | None, expected: str | None, rounding: float) -> bool:
    """Return whether the values are equal within the relative tolerance ``rounding``."""
    if value == expected or value is None or expected is None:
        return value == expected
    reference = float.fromhex(expected)
    return abs(float.fromhex(value) - reference) <= rounding * abs(reference)


def _shown(value: str | None) -> str:
    return "none" if value is None else f"{value} ({float.fromhex(value):.6g})"
