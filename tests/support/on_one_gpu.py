"""Trains the data-parallel cases of ``tests/gpu`` on one GPU, many at a time, and says which are not as eagerly.

    python -m tests.support.on_one_gpu --output equality.json
    python -m tests.support.on_one_gpu --only "experts" --logs logs

One after the other, as pytest runs them, they take an hour, of which the GPU works few minutes. What tests say beside
bits (graphs, replays) is in the file of results and not checked. A case for which the others had left no memory is
trained again. Needs a GPU and TransformerEngine.
"""

import argparse
import math
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.results_file import command_line, write_results
from tests.gpu import (
    test_changed_steps,
    test_ddp_graphs,
    test_fsdp_flags,
    test_fsdp_graphs,
    test_hybrid_sharding,
    test_local_graphs,
    test_pipeline_chunks,
)
from tests.support.gpus import DETERMINISTIC, ENGINES, SIZES
from tests.support.launch import launch, name_of

LAST = 75  # seconds of a process, about
CASES = 5  # of a process, which keeps memory of all that it has trained
# The controls of which a replay does nothing: they must differ.
DEAD = {"dead_local_replay", "dead_replay"}
LEFT_OUT = {"losses", "grad_norms", "threads", "instructions"}  # of results: they are compared already


class Job(NamedTuple):
    """A case, the file of tests that has it, and the engine that captures."""

    tests: str
    engine: str
    case: dict[str, Any]


def jobs() -> Iterator[Job]:
    """Yield all of them."""
    dead = [{"dtype": "bf16", "control": "dead_replay", "layers_per_graph": most} for most in (0, -1)]
    of_files = {
        "test_fsdp_flags": [SIZES | case for case in test_fsdp_flags.CASES["data parallel"]],
        "test_ddp_graphs": [test_ddp_graphs.DDP | case for case in test_ddp_graphs.DATA_PARALLEL],
        "test_changed_steps": [test_changed_steps.TWICE | case for case in test_changed_steps.CASES],
    }
    for engine in ENGINES:
        graphs = {"test_fsdp_graphs": [SIZES | case for case in test_fsdp_graphs._cases("data parallel", engine)]}
        for tests, cases in (graphs | of_files).items():
            yield from (Job(tests, engine, case) for case in cases)
    yield from (Job("test_fsdp_graphs", "native", SIZES | case) for case in dead)
    yield from (Job("test_hybrid_sharding", "native", SIZES | case) for case in test_hybrid_sharding.CASES)
    yield from (Job("test_pipeline_chunks", "native", SIZES | case) for case in test_pipeline_chunks.ON_ONE_GPU)
    for case in test_local_graphs.LAYOUTS["data parallel"][1]:
        yield Job("test_local_graphs", "native", test_local_graphs.LOCAL | case)


def train(part: list[Job], folder: Path) -> list[dict[str, Any]]:
    """Return the results of ``part``, jobs of one engine, from a process of its own; those after a crash say so."""
    folder.mkdir()
    environment = DETERMINISTIC | {"MEGATRON_CUDA_GRAPH_ENGINE": part[0].engine}
    done, found = launch([job.case for job in part], ranks=1, folder=folder, environment=environment)
    (folder / "log").write_text(done.stdout + done.stderr)
    missing = {"differences": [], "error": f"the process ended with {done.returncode}: {folder.name}/log"}
    results = [*found, *([missing] * (len(part) - len(found)))]
    return [
        {"tests": job.tests, "engine": job.engine, "case": name_of(job.case), "control": control(job)}
        | {key: value for key, value in result.items() if key not in {"case", *LEFT_OUT}}
        for job, result in zip(part, results, strict=True)
    ]


def control(job: Job) -> str:
    """Return the control of a job, empty for none."""
    return str(job.case.get("control", ""))


def is_as_it_should_be(result: dict[str, Any]) -> bool:
    """Whether a result is equal to eager training, or different if it must be."""
    return not result["error"] and bool(result["differences"]) == (result["control"] in DEAD)


def train_all(chosen: list[Job], folder: Path, processes: int, until: float) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yield each job with its result, as ``train`` returns it, of those that began before it was too late.

    Args:
        chosen: The jobs.
        folder: Where each process writes to a folder of its own.
        processes: At a time.
        until: When no further process begins, of ``time.monotonic``.
    """

    def in_time(part: list[Job], own: Path) -> list[dict[str, Any]]:
        return train(part, own) if time.monotonic() < until else []

    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for engine in ENGINES:
        own = [job for job in chosen if job.engine == engine]
        share = -(-len(own) // CASES)
        parts += [own[start::share] for start in range(share)]
    with ThreadPoolExecutor(processes) as pool:
        folders = (folder / f"{index}-{part[0].engine}" for index, part in enumerate(parts))
        for part, results in zip(parts, pool.map(in_time, parts, folders), strict=True):
            yield from zip(part, results, strict=False)


def lacked_memory(result: dict[str, Any]) -> bool:
    """Whether a case failed as the other processes had left no memory on the GPU."""
    return bool(re.search("out ?of ?memory", result["error"], re.IGNORECASE))


def main() -> int:
    """Train, print what is wrong, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file of the results, JSON; written as they come")
    parser.add_argument("--logs", type=Path, help="folder for what processes write")
    parser.add_argument("--processes", type=int, default=12, help="at a time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no process begins in the last 75 of them")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="cases that these capture")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    args = parser.parse_args()
    chosen = [job for job in jobs() if job.engine in args.engines and args.only in f"{job.tests} {name_of(job.case)}"]
    command = command_line("-m tests.support.on_one_gpu", sys.argv[1:]).replace("'", "")
    until = time.monotonic() + args.seconds - LAST
    results: list[dict[str, Any]] = []
    again: list[Job] = []

    def keep(result: dict[str, Any]) -> None:
        results.append(result)
        if args.output:
            write_results(args.output, command=command, cases=len(chosen), results=results)

    with TemporaryDirectory() as temporary:
        folder = args.logs or Path(temporary)
        for job, result in train_all(chosen, folder / "first", args.processes, until):
            if lacked_memory(result):
                again.append(job)
            else:
                keep(result)
        for _, result in train_all(again, folder / "again", min(2, args.processes), until):
            keep(result)
    wrong = [result for result in results if not is_as_it_should_be(result)]
    for result in wrong:
        what = result["error"][-800:] or result["differences"][:2] or "equal, and must not be"
        print(f"{result['tests']}, {result['engine']}: {result['case']}: {what}")
    print(f"{len(results) - len(wrong)} of {len(results)} as they should be, {len(again)} trained again for memory")
    if len(results) < len(chosen):
        print(f"{len(chosen) - len(results)} did not run: time was up")
    return bool(wrong or len(results) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
