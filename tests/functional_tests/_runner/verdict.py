"""Judge the results of cases."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import golden
from .case import Case
from .trainings import Found


@dataclass
class Verdict:
    """The comparisons of one case.

    Attributes:
        case: The case.
        found: Results of the case.
        differences: One line per difference.
        compared: References that were compared: the eager case, the file of golden values.
        notes: Reasons why a comparison was skipped.
    """

    case: Case
    found: Found
    differences: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the case was compared and has no differences."""
        return bool(self.compared) and not self.differences

    def row(self) -> dict[str, Any]:
        """Return the verdict as a dict for JSON."""
        return {
            "case": self.case.name,
            "passed": self.passed,
            "differences": self.differences,
            "compared with": self.compared,
            "notes": self.notes,
            "graphs": self.found.graphs,
            **self.found.measured,
        }


def judge(case: Case, found: Found, eager: Found | None) -> Verdict:
    """Compare with the eager case, and check that graphs exist only if requested.

    Args:
        case: The case.
        found: Results of the case.
        eager: Results of the case to equal; None if it was not trained.
    """
    verdict = Verdict(case, found)
    if found.error:
        verdict.differences.append(f"failed: {found.error}")
        return verdict
    if len(found.losses) != case.steps:
        verdict.differences.append(f"{len(found.losses)} steps, not {case.steps}")
    if (found.graphs > 0) != (case.graphs != "none"):
        verdict.differences.append(f"{found.graphs} CUDA graphs with --cuda-graph-impl {case.graphs}")
    if eager is None:
        return verdict
    name = str(case.equals)
    verdict.compared.append(name)
    verdict.differences += (
        [f"{name} failed: {eager.error}"] if eager.error else golden.differences_from(eager, found, name)
    )
    return verdict


def compare_with_golden(verdict: Verdict, file: Path) -> None:
    """Compare with the golden values in ``file`` if machine and versions match."""
    if verdict.found.error:
        return
    try:
        values = golden.read(file)
    except FileNotFoundError:
        verdict.notes.append(f"no golden values: there is no {file.name}; --record writes it")
        return
    elsewhere = golden.measured_elsewhere(values, verdict.case)
    if elsewhere:
        verdict.notes.append(f"golden values are not comparable: {'; '.join(elsewhere)}; --record writes new ones")
        return
    verdict.compared.append(file.name)
    verdict.differences += golden.differences(verdict.found, values, verdict.case)


def record(verdict: Verdict, file: Path) -> None:
    """Write the golden values of an eager case, or of a case that equals its eager case."""
    if verdict.differences:
        verdict.notes.append("no golden values recorded, as it differs")
        return
    golden.write(file, verdict.case, verdict.found)
    verdict.compared.append(f"{file.name}, recorded now")
