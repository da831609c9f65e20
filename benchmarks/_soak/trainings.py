"""Run several training jobs concurrently, in new processes."""

import json
import os
import subprocess
import sys
import time
from itertools import cycle, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
ENVIRONMENT = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "OMP_NUM_THREADS": "1"}
Steps = list[dict[str, Any]]


def gpus() -> list[str]:
    """Return the visible GPUs, as named in CUDA_VISIBLE_DEVICES."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (named.split(",") if named else [str(number) for number in range(count)])[:count]


class Trainings:
    """Runs several training jobs concurrently, on separate GPUs if there are enough.

    Args:
        ranks: Number of processes per job.
        at_once: Maximum number of concurrent jobs.
        logs: Folder for logs and metrics.

    Raises:
        ValueError: There are GPUs, but fewer than ``ranks``.
    """

    def __init__(self, ranks: int, at_once: int, logs: Path) -> None:
        self._ranks, self._logs = ranks, logs
        devices = gpus()
        groups = [",".join(devices[first : first + ranks]) for first in range(0, len(devices) - ranks + 1, ranks)]
        if devices and not groups:
            raise ValueError(f"--ranks {ranks} needs {ranks} GPUs, but {len(devices)} are visible: pass fewer ranks")
        self._on_cpu = not devices
        self._places: SimpleQueue[str] = SimpleQueue()
        for group in islice(cycle(groups or [""]), at_once):
            self._places.put(group)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped = False
        self._start = time.monotonic()

    def train(self, name: str, flags: str) -> Steps:
        """Train as soon as GPUs are free, and return the metrics of each step (``examples/step_metrics.py``).

        Raises:
            RuntimeError: A process failed. The message has the end of the log.
        """
        place = self._places.get()
        try:
            return self._train(name, flags, place)
        finally:
            self._running.pop(name, None)
            self._places.put(place)

    def _train(self, name: str, flags: str, place: str) -> Steps:
        if self._stopped:
            raise RuntimeError(f"{name} was not started: the benchmark was stopped")
        metrics, log = self._metrics(name), self._logs / f"{name}.log"
        metrics.unlink(missing_ok=True)
        backend = "-m megatron_fsdp_cuda_graphs.cpu_backend" if self._on_cpu else ""
        launch = f"-m torch.distributed.run --standalone --nproc-per-node {self._ranks} {backend} {SCRIPT} {flags}"
        environment = os.environ | ENVIRONMENT | {"STEP_METRICS_PATH": str(metrics), "CUDA_VISIBLE_DEVICES": place}
        environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # one hardware queue would serialize FSDP's collectives
        with log.open("w") as file:
            process = subprocess.Popen([sys.executable, *launch.split()], stdout=file, stderr=file, env=environment)
        self._running[name] = process
        if process.wait():
            raise RuntimeError(f"{name} failed:\n{log.read_text(errors='replace')[-6000:]}")
        return [json.loads(line) for line in metrics.read_text().splitlines()]

    def progress(self) -> str:
        """Return a message with the elapsed seconds and the number of steps of each running job."""
        steps = {name: _lines(self._metrics(name)) for name in sorted(self._running)}
        counts = ", ".join(f"{name} {count} steps" for name, count in steps.items())
        return f"{time.monotonic() - self._start:5.0f} s: {counts}"

    def stop(self) -> None:
        """Stop all running jobs, and prevent new ones."""
        self._stopped = True
        for process in list(self._running.values()):
            process.terminate()

    def _metrics(self, name: str) -> Path:
        return self._logs / f"{name}.jsonl"


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0
