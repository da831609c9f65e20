"""Train the cases of ``tests/gpu`` concurrently on all GPUs of this machine, and list differences from eager.

    python -m tests.support.trainings.on_gpus --output equality.json
    python -m tests.support.trainings.on_gpus --layouts "two instances" --tests test_hybrid_sharding --logs logs
    python -m tests.support.trainings.on_gpus --share 1/2 --output first_half.json

Under pytest, the same cases take hours while GPUs are mostly idle. The results include graph and replay counts, which
are not checked. Cases that run out of memory are trained again, with at most two launches at a time. Requires GPUs and
TransformerEngine.
"""

import argparse
import math
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.results_file import command_line, write_results
from tests.gpu import (
    test_changed_steps,
    test_ddp_graphs,
    test_frozen_parameters,
    test_fsdp_flags,
    test_fsdp_graphs,
    test_full_iteration,
    test_hybrid_sharding,
    test_local_graphs,
    test_pipeline_chunks,
)
from tests.support.sample import name_of
from tests.support.trainings.gpus import DETERMINISTIC, GPUS, SIZES
from tests.support.trainings.launch import launch

LAST = 75  # approximate duration of a launch in seconds
CASES = 5  # per launch; each case leaves memory allocated
# Controls that must differ from eager
DEAD = {"dead_local_replay", "dead_replay"}
LEFT_OUT = {"losses", "grad_norms", "threads", "instructions"}  # keys of results that were already compared


class Job(NamedTuple):
    """A case and its rank layout.

    Attributes:
        tests: Name of the test module.
        layout: Name of the layout in that module.
        case: Arguments of ``Case.of``, and ``control``.
        options: Arguments of ``compare_runs.py`` for the layout.
        variables: Names and values of environment variables.
    """

    tests: str
    layout: str
    case: dict[str, Any]
    options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


def jobs() -> Iterator[Job]:
    """Yield all jobs for the visible GPUs."""
    for layout in test_fsdp_graphs.RUNS:
        options, extra, _ = test_fsdp_graphs.LAYOUTS[layout]
        for case in test_fsdp_graphs.cases_of(layout):
            yield Job("test_fsdp_graphs", layout, SIZES | extra | case, tuple(options))
    for layout in test_fsdp_flags.RUNS:
        for case in test_fsdp_flags.CASES[layout]:
            yield Job("test_fsdp_flags", layout, SIZES | case, tuple(test_fsdp_flags.LAYOUTS[layout]))
    for layout in test_ddp_graphs.RUNS:
        options, cases, _ = test_ddp_graphs.LAYOUTS[layout]
        variables = (("CUDA_LAUNCH_BLOCKING", "1"),) if layout == test_ddp_graphs.BLOCKING else ()
        for case in cases:
            yield Job("test_ddp_graphs", layout, test_ddp_graphs.DDP | case, tuple(options), variables)
    for case in test_changed_steps.CASES:
        yield Job("test_changed_steps", "data parallel", test_changed_steps.TWICE | case)
    for case in test_frozen_parameters.CASES:
        yield Job("test_frozen_parameters", "data parallel", SIZES | case)
    for holds in "model", "layer":
        case = SIZES | {"dtype": "bf16", "control": "dead_replay", "holds": holds}
        yield Job("test_fsdp_graphs", "data parallel", case)
    instances = ("--instances", str(min(max(GPUS, 1), 2)))
    for case in test_hybrid_sharding.CASES:
        yield Job("test_hybrid_sharding", "two instances", SIZES | case, instances)
    chunks = test_pipeline_chunks
    for case in chunks.STAGES if GPUS > 1 else ():
        yield Job("test_pipeline_chunks", "PP2", SIZES | case, ("--pp", "2"))
    for layout in test_local_graphs.RUNS:
        options, cases, _ = test_local_graphs.LAYOUTS[layout]
        for case in cases:
            yield Job("test_local_graphs", layout, test_local_graphs.LOCAL | case, tuple(options))
    for layout in test_full_iteration.RUNS:
        options, _ = test_full_iteration.LAYOUTS[layout]
        for case in test_full_iteration.CASES:
            yield Job("test_full_iteration", layout, test_full_iteration.FULL | case, tuple(options))


def together(chosen: list[Job]) -> Iterator[list[Job]]:
    """Yield groups of up to ``CASES`` jobs with equal layouts, options and variables, one group per launch."""
    alike: dict[Any, list[Job]] = {}
    for job in chosen:
        alike.setdefault((job.layout, job.options, job.variables), []).append(job)
    for own in alike.values():
        launches = -(-len(own) // CASES)
        yield from (own[start::launches] for start in range(launches))


def train(part: list[Job], folder: Path) -> list[dict[str, Any]]:
    """Train the jobs of a launch and return one result per job.

    After a crash, jobs without a result report the crash. If all jobs have results, the last job reports it.
    """
    folder.mkdir()
    first = part[0]
    environment = DETERMINISTIC | dict(first.variables)
    done, found = launch([job.case for job in part], *first.options, ranks=GPUS, folder=folder, environment=environment)
    (folder / "log").write_text(done.stdout + done.stderr)
    if done.returncode:
        fatal = done.stderr.find("Fatal Python error")  # printed by faulthandler on a fatal signal
        print(f"{folder.name}:", done.stderr[-3000:] if fatal < 0 else done.stderr[max(0, fatal - 1000) :][:4000])
    crashed = {"differences": [], "error": f"the process ended with {done.returncode}: {folder.name}/log"}
    results = [*found, *([crashed] * (len(part) - len(found)))]
    if done.returncode and len(found) == len(part):  # crashed while exiting
        results[-1] |= {"error": results[-1]["error"] or crashed["error"]}
    return [
        {"tests": job.tests, "layout": job.layout, "case": name_of(job.case)}
        | {"control": control(job)}
        | {key: value for key, value in result.items() if key not in {"case", *LEFT_OUT}}
        for job, result in zip(part, results, strict=True)
    ]


def control(job: Job) -> str:
    """Return the name of a job's control, or an empty string."""
    return str(job.case.get("control", ""))


def is_expected(result: dict[str, Any]) -> bool:
    """Return whether a result equals eager; with a control in ``DEAD``, whether it differs from eager."""
    return not result["error"] and bool(result["differences"]) == (result["control"] in DEAD)


def train_all(chosen: list[Job], folder: Path, processes: int, until: float) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Train jobs concurrently, and yield each job that started before the deadline with its result.

    Args:
        chosen: The jobs.
        folder: Parent of the folders of the launches.
        processes: Number of concurrent launches.
        until: Deadline for starting launches, in ``time.monotonic``.
    """

    def in_time(part: list[Job], own: Path) -> list[dict[str, Any]]:
        return train(part, own) if time.monotonic() < until else []

    folder.mkdir(parents=True, exist_ok=True)
    parts = [*together(chosen)]
    with ThreadPoolExecutor(processes) as pool:
        folders = (folder / str(index) for index, part in enumerate(parts))
        for part, results in zip(parts, pool.map(in_time, parts, folders), strict=True):
            yield from zip(part, results, strict=False)


def lacked_memory(result: dict[str, Any]) -> bool:
    """Return whether a case ran out of GPU memory."""
    return bool(re.search("out ?of ?memory", result["error"], re.IGNORECASE))


def main() -> int:
    """Train, print unexpected results, and write all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file for the results; updated after each launch")
    parser.add_argument("--logs", type=Path, help="folder for the logs of the processes")
    parser.add_argument("--processes", type=int, default=6, help="concurrent launches, each on all GPUs")
    parser.add_argument("--seconds", type=float, default=math.inf, help=f"time limit; last launch {LAST} s before it")
    parser.add_argument(
        "--share", default="1/1", metavar="PART/PARTS", help="every PARTS-th launch, starting with launch PART"
    )
    known = [*jobs()]
    layouts, files = ({*names} for names in zip(*((job.layout, job.tests) for job in known), strict=True))
    parser.add_argument("--cases", type=int, help="maximum number of cases of each layout")
    parser.add_argument("--layouts", nargs="+", choices=sorted(layouts), default=layouts, help="default: all")
    parser.add_argument("--tests", nargs="+", choices=sorted(files), default=files, help="default: all")
    args = parser.parse_args()
    named = [job for job in known if job.layout in args.layouts and job.tests in args.tests]
    if args.cases:
        by_layout = groupby(named, key=lambda job: (job.tests, job.layout))
        named = [job for _, group in by_layout for job in [*group][: args.cases]]
    part, parts = map(int, args.share.split("/"))
    launches = [*together(named)][part - 1 :: parts]
    chosen = [job for each in launches for job in each]
    command = command_line("-m tests.support.trainings.on_gpus", sys.argv[1:]).replace("'", "")
    until = time.monotonic() + args.seconds - LAST
    results: list[dict[str, Any]] = []
    again: list[Job] = []

    def keep(result: dict[str, Any]) -> None:
        results.append(result)
        if args.output:
            write_results(args.output, command=command, gpus=GPUS, cases=len(chosen), results=results)

    with TemporaryDirectory() as temporary:
        folder = args.logs or Path(temporary)
        for job, result in train_all(chosen, folder / "first", args.processes, until):
            if lacked_memory(result):
                again.append(job)
            else:
                keep(result)
        for _, result in train_all(again, folder / "again", min(2, args.processes), until):
            keep(result)
    wrong = [result for result in results if not is_expected(result)]
    for result in wrong:
        what = result["error"][-800:] or result["differences"][:2] or "equal, but must differ"
        print(f"{result['tests']}, {result['layout']}: {result['case']}: {what}")
    print(f"{len(results) - len(wrong)} of {len(results)} as expected, {len(again)} ran out of memory at first")
    if len(results) < len(chosen):
        print(f"{len(chosen) - len(results)} did not run: pass more --seconds")
    return bool(wrong or len(results) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
