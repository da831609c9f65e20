"""Profile a few training steps: CUDA API calls and GPU work, then Python calls."""

import cProfile
import io
import pstats
import time
from pathlib import Path
from typing import Any

import torch

from . import cuda_trace
from .configurations import LOG_INTERVAL

BEFORE = LOG_INTERVAL  # after warm-up and capture; no step logs before the next multiple of LOG_INTERVAL
STEPS = 3  # traced
# Traced steps, an untraced step, and a step with counted Python calls.
LAST = BEFORE + STEPS + 2
LISTED = 60  # functions with the longest time, including the functions that they call


class StepProfile:
    """Profiles training steps on this rank.

    Args:
        folder: Folder for the CUDA trace and the profile of Python functions.
        name: Prefix of the names of both files.
        on_gpu: Whether to trace CUDA.
    """

    def __init__(self, folder: Path, name: str, *, on_gpu: bool):
        self.figures: dict[str, Any] = {}
        self._folder, self._name, self._on_gpu = folder, name, on_gpu
        self._start = 0.0
        self._profiler: Any = None
        self._python = cProfile.Profile()  # since Python 3.12, covers all threads, including autograd's

    def after_step(self, step: int) -> None:
        """Start or stop profiling after ``step``, counted from 1."""
        if step == BEFORE and self._on_gpu:
            self._start_trace()
        elif step == BEFORE + STEPS and self._on_gpu:
            self._stop_trace()
        elif step == LAST - 1:
            torch.cuda.synchronize()
            self._python.enable()
        elif step == LAST:
            self._python.disable()
            self._read_python_calls()

    def _start_trace(self) -> None:
        # Tracing operators would distort the measured host time.
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        torch.cuda.synchronize()
        self._profiler.start()
        self._start = time.perf_counter()

    def _stop_trace(self) -> None:
        torch.cuda.synchronize()
        wall = (time.perf_counter() - self._start) * 1000
        self._profiler.stop()
        path = self._folder / f"{self._name}.trace.json.gz"
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None
        self.figures |= cuda_trace.figures(cuda_trace.read_events(path), steps=STEPS, wall_ms=wall)

    def _read_python_calls(self) -> None:
        text = io.StringIO()
        stats = pstats.Stats(self._python, stream=text)
        for order in ("tottime", "cumulative", "ncalls"):
            stats.sort_stats(order).print_stats(40)
        (self._folder / f"{self._name}.python.txt").write_text(text.getvalue())
        counted = stats.stats.items()  # type: ignore[attr-defined]
        self.figures["python_calls"] = sum(row[1] for (file, *_), row in counted if file != "~")
        self.figures["builtin_calls"] = sum(row[1] for (file, *_), row in counted if file == "~")
        took = {f"{Path(file).stem}.{name}": row[3] * 1000 for (file, _, name), row in counted if file != "~"}
        longest = sorted(took, key=took.__getitem__, reverse=True)[:LISTED]
        self.figures["python_ms"] = {name: round(took[name], 3) for name in longest}
