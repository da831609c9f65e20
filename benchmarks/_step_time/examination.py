"""Looks closely at a capture, or at the memory of a training, on one rank."""

import cProfile
import io
import pstats
from typing import Any

import torch

from . import memory_sites
from .capture_phases import CapturePhases
from .recorder import CaptureClock
from .variants import WARMUP_STEPS

FUNCTIONS = 60  # that a profile lists


class PhasesOfCapture:
    """What the host did during the captures of a training.

    Args:
        clock: Says when there is one.
    """

    def __init__(self, clock: CaptureClock):
        self._clock = clock
        clock.watches = self._phases = CapturePhases()
        self._phases.install()

    def after_step(self, step: int) -> None:
        """Called after each step."""

    def found(self) -> dict[str, Any]:
        """Milliseconds and calls, by what the host did; with the seconds of all captures."""
        self._clock.watches = None
        return {"seconds": round(self._clock.seconds, 3), "phases": self._phases.figures()}


class FunctionsOfCapture:
    """The functions that the host called during the captures of a training; counting them takes longer than they do.

    Args:
        clock: Says when there is one.
    """

    def __init__(self, clock: CaptureClock):
        self._clock = clock
        clock.watches = self
        self._profile = cProfile.Profile()

    def begin(self) -> None:
        """Count from now on."""
        self._profile.enable()

    def end(self) -> None:
        """Count no more."""
        self._profile.disable()

    def after_step(self, step: int) -> None:
        """Called after each step."""

    def found(self) -> dict[str, Any]:
        """The functions with most time of their own, and those with most in what they called."""
        self._clock.watches = None
        text = io.StringIO()
        stats = pstats.Stats(self._profile, stream=text)
        for order in ("tottime", "cumulative"):
            stats.sort_stats(order).print_stats(FUNCTIONS)
        return {"seconds": round(self._clock.seconds, 3), "functions": text.getvalue()}


class Memory:
    """The memory of a training: of each step; by pool and line right before a capture, after it and at the end.

    And where most is used from the capture on, or from the step on in which there would be one.

    Args:
        clock: Says when there is a capture.
    """

    def __init__(self, clock: CaptureClock):
        self._clock = clock
        clock.watches = self
        self._found: dict[str, Any] = {}
        self._steps: list[dict[str, float]] = []
        memory_sites.record()

    def begin(self) -> None:
        """Look before a capture."""
        self._look("before capture")
        memory_sites.record()

    def end(self) -> None:
        """Look after a capture."""
        self._look("after capture")
        self.after_step(0)

    def after_step(self, step: int) -> None:
        """Note the memory of a step; of a capture as of step 0."""
        torch.cuda.synchronize()
        names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
        self._steps.append({"step": step} | {name: getattr(torch.cuda, name)() // 2**20 for name in names})
        torch.cuda.reset_peak_memory_stats()
        if step == WARMUP_STEPS:
            memory_sites.record()

    def _look(self, when: str) -> None:
        self._found[when] = memory_sites.summary(torch.cuda.memory_snapshot(include_traces=False))

    def found(self) -> dict[str, Any]:
        """MiB after each step and at most in it, and what they are used for."""
        self._clock.watches = None
        self._look("at the end")
        peaks = memory_sites.peaks(*memory_sites.history())
        memory_sites.stop()
        return {"steps": self._steps, **self._found, "at the peak": peaks}


EXAMINATIONS: dict[str, Any] = {"capture": PhasesOfCapture, "functions": FunctionsOfCapture, "memory": Memory}
