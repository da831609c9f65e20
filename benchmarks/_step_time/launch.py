"""Launch the ranks of a plan; if a run fails or hangs, continue with the next ones."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .plan import Run

WORKER = Path(__file__).with_name("worker.py")
CPU_BACKEND = ("-m", "megatron_fsdp_cuda_graphs.cpu_backend")
LOG_LINES = 30
Result = dict[str, Any]


def run_plan(
    runs: list[Run],
    *,
    ranks: int,
    on_cpu: bool,
    logs: Path,
    stall_seconds: float,
    show: Callable[[Run, Result], None],
) -> None:
    """Train ``runs`` in new processes. Runs with equal process environments share a launch until one fails.

    Args:
        runs: Runs to train.
        ranks: Number of processes.
        on_cpu: Whether to use the CPU backend.
        logs: Existing folder for logs and traces.
        stall_seconds: Time limit per run.
        show: Called with each finished run and its result, which has 'error' if the run failed.
    """
    variables = _environment(on_cpu)
    left = list(runs)
    launches = 0
    while left:
        log = logs / f"ranks-{ranks}-{runs[0].configuration.partition(':')[0]}-{launches}.log"
        launches += 1
        own = left[0].process_environment
        together = [run for run in left if run.process_environment == own]
        others = [run for run in left if run.process_environment != own]
        left = others + _launch(
            together,
            log,
            ranks=ranks,
            on_cpu=on_cpu,
            stall_seconds=stall_seconds,
            show=show,
            environment=variables | own,
        )


def _launch(
    runs: list[Run],
    log: Path,
    *,
    ranks: int,
    on_cpu: bool,
    stall_seconds: float,
    show: Callable[[Run, Result], None],
    environment: dict[str, str],
) -> list[Run]:
    """Train ``runs`` in one launch. After a failure, return the remaining runs, except those of the failed variant."""
    plan, results = log.with_suffix(".plan.json"), log.with_suffix(".results.jsonl")
    plan.write_text(json.dumps([asdict(run) for run in runs]))
    results.write_text("")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [*(CPU_BACKEND if on_cpu else ()), str(WORKER), str(plan), str(results), str(log.parent)]
    by_number = {run.number: run for run in runs}
    ended: set[int] = set()
    seen, current, news = 0, runs[0], time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            while True:
                over = process.poll() is not None
                events = [json.loads(line) for line in results.read_text().split("\n")[:-1]]
                for event in events[seen:]:
                    news, current = time.monotonic(), by_number[event["run"]]
                    if event["event"] == "ended" or (event["event"] == "failed" and current.number not in ended):
                        ended.add(current.number)
                        show(current, event)
                seen = len(events)
                stalled = time.monotonic() - news > stall_seconds
                if over or stalled or len(ended) == len(runs):
                    break  # processes can hang when they shut down NCCL
                time.sleep(0.2)
        finally:
            process.terminate()  # torchrun forwards it to its workers
            process.wait()
    left = [run for run in runs if run.number not in ended]
    if not left:
        return []
    failed = current
    if current.number not in ended or stalled or not _reported(events):
        failed = left[0]
        reason = f"no progress for {stall_seconds:.0f} s" if stalled else f"exit code {process.returncode}"
        show(failed, {"error": f"{reason}\n{_end_of(log)}"})
    # Do not profile a failed variant.
    return [run for run in left if (run.configuration, run.variant) != (failed.configuration, failed.variant)]


def _reported(events: list[Result]) -> bool:
    return bool(events) and events[-1]["event"] == "failed"


def _end_of(log: Path) -> str:
    """Return the last lines of a log before torchrun's error report."""
    lines = log.read_text(errors="replace").splitlines()
    ends = (number for number, line in enumerate(lines) if "torch/distributed/elastic" in line)
    lines = lines[: next(ends, None)]
    return "\n".join(lines[-LOG_LINES:])


def _environment(on_cpu: bool) -> dict[str, str]:
    # Makes cuDNN's attention backward deterministic.
    environment = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "OMP_NUM_THREADS": "1", **os.environ}
    # One hardware queue would serialize FSDP's collectives and the kernels of layers.
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    environment.pop("STEP_METRICS_PATH", None)
    if on_cpu:
        environment |= {"MEGATRON_STEP_TIME_ON_CPU": "1", "TORCHDYNAMO_DISABLE": "1"}
    return environment
