"""Profiles a few steps of a training: CUDA's API and GPU work, then Python's function calls."""

import cProfile
import io
import pstats
import time
from pathlib import Path
from typing import Any

import torch

from . import cuda_trace
from .configurations import LOG_INTERVAL

BEFORE = LOG_INTERVAL  # steps that settle, the capture among them: none of those that follow prints
STEPS = 3  # traced
# The traced steps, one between, and one whose Python calls are counted.
LAST = BEFORE + STEPS + 2


class StepProfile:
    """Profiles steps of a training on this rank, told of each by ``after_step``.

    Args:
        folder: Where the trace and the list of functions go.
        name: First part of their names.
        top: How many Python functions to list.
        on_gpu: Whether there is anything for torch's profiler to trace.
    """

    def __init__(self, folder: Path, name: str, *, top: int, on_gpu: bool):
        self.figures: dict[str, Any] = {}
        self._folder, self._name, self._top, self._on_gpu = folder, name, top, on_gpu
        self._start = 0.0
        self._profiler: Any = None
        self._python = cProfile.Profile()  # since Python 3.12 of all threads, autograd's among them

    def after_step(self, step: int) -> None:
        """Start or stop profiling after ``step``, numbered from 1."""
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
        # Operators are not traced: that would slow the host down, whose work is to be measured.
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
            stats.sort_stats(order).print_stats(self._top)
        (self._folder / f"{self._name}.python.txt").write_text(text.getvalue())
        counted = stats.stats.items()  # type: ignore[attr-defined]
        self.figures["python_calls"] = sum(row[1] for (file, *_), row in counted if file != "~")
        self.figures["builtin_calls"] = sum(row[1] for (file, *_), row in counted if file == "~")
