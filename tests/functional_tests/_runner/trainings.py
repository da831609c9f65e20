"""Train cases, in one launch if they can share processes."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks._step_time.launch import run_plan
from benchmarks._step_time.plan import Run

from .case import Case

ROOT = Path(__file__).resolve().parents[3]
# Megatron keeps the process groups of the first training run of a process.
GROUPS = ("parallel-size", "--num-distributed-optimizer-instances")


@dataclass
class Found:
    """Results of a training run.

    Attributes:
        losses, norms: Loss and gradient norm of each step as ``float.hex``, or None.
        evaluations: Loss of each evaluation as ``float.hex``, or None.
        graphs: Final number of CUDA graphs on the first rank.
        measured: Step time in ms and memory in MiB, keyed by the names in ``case.MEASURED``.
        error: End of the log of a failed run.
    """

    losses: list[str | None] = field(default_factory=list)
    norms: list[str | None] = field(default_factory=list)
    evaluations: list[str | None] = field(default_factory=list)
    graphs: int = 0
    measured: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    def add(self, result: dict[str, Any], names: Iterable[str]) -> None:
        """Add the result of ``worker.py`` for a run or its next part; measurements of the last part are kept."""
        if "error" in result:
            self.error = self.error or result["error"]
            return
        self.losses += [loss for loss, _ in result["numbers"]]
        self.norms += [norm for _, norm in result["numbers"]]
        self.evaluations += result["evaluations"]
        self.graphs = result["graphs"]
        self.measured = {name: result[name] for name in names}


def train(
    cases: Iterable[Case],
    *,
    names: Iterable[str],
    logs: Path,
    stall_seconds: float,
    ended: Callable[[Case, dict[str, Found]], None],
) -> None:
    """Train ``cases`` and print one line per run.

    Args:
        cases: The cases.
        names: Names of the measurements to keep.
        logs: Existing folder for logs and checkpoints.
        stall_seconds: Maximum duration of a run.
        ended: Called with each finished case and all results so far, keyed by case name.
    """
    found: dict[str, Found] = {}
    for number, group in enumerate(_launches(cases)):
        runs: list[Run] = []
        trained = {}
        for case in group:
            found[case.name] = Found()
            for run in _runs(case, len(runs), logs):
                runs.append(run)
                trained[run.number] = case

        def show(run: Run, result: dict[str, Any], trained: dict[int, Case] = trained) -> None:
            case = trained.pop(run.number)
            found[case.name].add(result, names)
            seconds = f"{result['seconds']} s" if "seconds" in result else "FAILED"
            print(f"{case.name} ({run.variant}): {seconds}", flush=True)
            if case not in trained.values():
                ended(case, found)

        folder = logs / f"launch-{number}"
        folder.mkdir()
        first = group[0]
        run_plan(
            runs,
            ranks=first.ranks,
            on_cpu=first.on_cpu,
            logs=folder,
            stall_seconds=stall_seconds,
            show=show,
            environment=_environment(first),
        )


def _launches(cases: Iterable[Case]) -> list[list[Case]]:
    """Group the cases that can share processes."""
    groups: dict[Any, list[Case]] = {}
    for case in cases:
        layout = [f"{flag} {value}" for flag, value in case.arguments.items() if flag.endswith(GROUPS)]
        key = (case.on_cpu, case.ranks, frozenset(_environment(case).items()), frozenset(layout))
        groups.setdefault(key, []).append(case)
    return list(groups.values())


def _environment(case: Case) -> dict[str, str]:
    """Return the environment variables for the processes of a case."""
    path = [os.environ.get("PYTHONPATH"), *(str(ROOT / folder) for folder in case.python_path)]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if case.on_cpu else {}
    return case.environment | hidden | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def _runs(case: Case, number: int, logs: Path) -> list[Run]:
    """Return the runs of a case: one, or two if it resumes."""
    numbers = count(number)

    def run(variant: str, steps: int, *more: str) -> Run:
        return Run(
            next(numbers),
            case.name.replace("/", "-"),
            variant,
            [*case.flags, *more],
            {},
            side_stream=case.graphs == "transformer_engine",
            steps=steps,
            profiled=False,
        )

    if not case.resumes:
        return [run("training", case.steps)]
    middle, checkpoint = case.steps // 2, str(logs / f"checkpoint-{case.name.replace('/', '-')}")
    until = str(middle)
    return [
        run("first half", middle, "--save", checkpoint, "--save-interval", until, "--exit-interval", until),
        run("second half", case.steps, "--load", checkpoint),
    ]
