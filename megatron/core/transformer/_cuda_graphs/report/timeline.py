"""When the passes of a capture began and ended, how much memory there was, and how far the capture is."""

import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .record import BACKWARD, FORWARD, CapturedPass, MemorySample

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

Planned = tuple[int | None, int, str]  # layer, micro-batch, kind

_BETWEEN_LINES = 30.0  # seconds


class Timeline:
    """Notes passes as they begin, and shows how many of them are done.

    A pass ends where the next begins, so what runs between hooks (delayed weight gradients) counts for the pass before.
    Times are the host's: in warm-up the device may be behind.

    Attributes:
        samples: What the memory was, in the order of time.
        warm_up_seconds: By layer; None stands for all that are in one graph.
        waited: Seconds in which this rank waited for others.
        order: The passes that one capture has; empty for those of one graph.
    """

    def __init__(self) -> None:
        self._zero = time.perf_counter()
        self.samples: list[MemorySample] = []
        self.passes: list[CapturedPass] = []
        self.warm_up_seconds: defaultdict[int | None, float] = defaultdict(float)
        self.waited = 0.0
        self.order: Sequence[Planned] = ()
        self._names: Sequence[str] = ()
        self._warm_ups = 0
        self._begun = 0  # passes
        self._open: tuple[Planned, bool, float] | None = None  # the pass, whether it is captured, when it began
        self._progress: Progress | None = None

    def sample(self, phase: str) -> None:
        """Note how much memory there is."""
        now = time.perf_counter() - self._zero
        self.samples.append(MemorySample(now, phase, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))

    def expect(self, order: Sequence[Planned], names: Sequence[str], warm_ups: int) -> None:
        """Say which passes will begin.

        Args:
            order: Those of one iteration of warm-up, and of capture; empty for those of the whole model.
        """
        self.order, self._names, self._warm_ups, self._begun = order, names, warm_ups, 0

    def begin(self, what: str, phase: str = "") -> None:
        """Note that something begins.

        Args:
            phase: ``forward`` or ``backward`` if it is a pass.
        """
        self._end_pass()
        if phase not in (FORWARD, BACKWARD):
            return
        planned: Planned = (None, 0, phase)
        if self.order:
            iteration, place = divmod(self._begun, len(self.order))
            planned, captured = self.order[place], iteration >= self._warm_ups
            what = what if planned[0] is None else self._names[planned[0]]
        else:
            captured = torch.cuda.is_current_stream_capturing()
        self._begun += 1
        kind = "capture" if captured else "warm-up"
        if captured or not self.samples or self.samples[-1].phase != kind:
            self.sample(kind)
        if self._progress is None:
            self._progress = Progress(len(self.order) * (self._warm_ups + 1) or None)
        self._progress.begin(f"{what}, {planned[2]} {kind}")
        self._open = planned, captured, time.perf_counter()

    def wait(self, wait: Callable[[], object]) -> None:
        """Call ``wait``, which waits for other ranks; what it takes counts for no pass."""
        before = time.perf_counter()
        wait()
        waited = time.perf_counter() - before
        self.waited += waited
        if self._open is not None:
            planned, captured, start = self._open
            self._open = planned, captured, start + waited

    def _end_pass(self) -> None:
        if self._open is None:
            return
        (layer, micro_batch, kind), captured, start = self._open
        self._open = None
        seconds = time.perf_counter() - start
        if captured:
            self.passes.append(CapturedPass(layer, micro_batch, kind, start - self._zero, seconds))
        else:
            self.warm_up_seconds[layer] += seconds

    def end(self) -> None:
        """Say that the last pass is over, or that no other will follow."""
        if self._open is not None:
            self._end_pass()
            self.sample("captured")
        if self._progress is not None:
            self._progress.close()
            self._progress = None


class Progress:
    """Shows how many passes of a capture are done, and which comes next.

    That is a progress bar, if there is ``tqdm`` and stderr is a terminal, and otherwise a line of the log now and then.

    Args:
        total: The number of passes; None if it is not known.
    """

    def __init__(self, total: int | None):
        self._total = total
        self._begun, self._last_line = 0, time.perf_counter()
        self._bar = _bar(total)

    def begin(self, what: str) -> None:
        """Say that a pass begins, and so that the one before is done."""
        self._begun += 1
        if self._bar is not None:
            self._bar.set_postfix_str(what, refresh=False)
            self._bar.update(int(self._begun > 1))
        elif time.perf_counter() - self._last_line > _BETWEEN_LINES:
            self._last_line = time.perf_counter()
            of = "" if self._total is None else f" of {self._total}"
            logger.info(f"CUDA graph capture: pass {self._begun}{of}, {what}")

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()


def _bar(total: int | None) -> Any | None:
    if sys.stderr is None or getattr(sys.stderr, "closed", False) or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc="CUDA graphs", unit="pass", leave=False)
