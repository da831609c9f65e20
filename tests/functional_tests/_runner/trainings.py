"""Trains cases, those that can share processes one after the other in one launch."""

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
# Megatron keeps the process groups of a process's first training.
GROUPS = ("parallel-size", "--num-distributed-optimizer-instances")


@dataclass
class Found:
    """What a training of a case gave.

    Attributes:
        losses, norms: Loss and gradient norm of each step, from the first, as ``float.hex``; None where there is none.
        evaluations: Loss of each evaluation, likewise.
        graphs: CUDA graphs of the first rank, at the end.
        measured: Milliseconds of a step and memory in MiB, by the names in ``case.MEASURED``.
        error: The end of the log of a training that failed.
    """

    losses: list[str | None] = field(default_factory=list)
    norms: list[str | None] = field(default_factory=list)
    evaluations: list[str | None] = field(default_factory=list)
    graphs: int = 0
    measured: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    def add(self, result: dict[str, Any], names: Iterable[str]) -> None:
        """Add what ``worker.py`` told of a training, or of its next part, whose measurements count."""
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
    """Train ``cases``, and print a line for each training.

    Args:
        cases: What to train.
        names: What is kept of the measurements.
        logs: An existing folder for logs and checkpoints.
        stall_seconds: How long a training may take.
        ended: Called with each case that has ended, and what was found so far, by the case's name.
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
    """The cases by what only new processes can change."""
    groups: dict[Any, list[Case]] = {}
    for case in cases:
        layout = [f"{flag} {value}" for flag, value in case.arguments.items() if flag.endswith(GROUPS)]
        key = (case.on_cpu, case.ranks, frozenset(_environment(case).items()), frozenset(layout))
        groups.setdefault(key, []).append(case)
    return list(groups.values())


def _environment(case: Case) -> dict[str, str]:
    """The variables that the processes of a case are started with."""
    path = [os.environ.get("PYTHONPATH"), *(str(ROOT / folder) for folder in case.python_path)]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if case.on_cpu else {}
    return case.environment | hidden | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def _runs(case: Case, number: int, logs: Path) -> list[Run]:
    """The trainings of a case: one, or one to its middle and one from there."""
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
            top_python=0,
        )

    if not case.resumes:
        return [run("training", case.steps)]
    middle, checkpoint = case.steps // 2, str(logs / f"checkpoint-{case.name.replace('/', '-')}")
    until = str(middle)
    return [
        run("first half", middle, "--save", checkpoint, "--save-interval", until, "--exit-interval", until),
        run("second half", case.steps, "--load", checkpoint),
    ]
