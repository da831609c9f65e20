"""When the passes of a capture began and ended, and how much memory there was."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from .progress import Progress
from .record import BACKWARD, FORWARD, CapturedPass, MemorySample

Planned = tuple[int | None, int, str]  # layer, micro-batch, kind


def device_memory() -> tuple[int, int]:
    """Return the bytes of tensors on the device, and those that the allocator has taken."""
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


class Timeline:
    """Notes passes as they begin.

    A pass ends where the next begins, so what runs between hooks (delayed weight gradients) counts for the pass before.
    Times are the host's: in warm-up the device may be behind.

    Args:
        memory: Returns allocated and reserved bytes.

    Attributes:
        samples: What the memory was, in the order of time.
        warm_up_seconds: By layer; None stands for all that are in one graph.
        waited: Seconds in which this rank waited for others.
        order: The passes that one capture has; empty for those of one graph.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        memory: Callable[[], tuple[int, int]] = device_memory,
    ):
        self._clock, self._memory = clock, memory
        self._zero = clock()
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

    @property
    def now(self) -> float:
        """Seconds since the capture began."""
        return self._clock() - self._zero

    def sample(self, phase: str) -> None:
        """Note how much memory there is."""
        self.samples.append(MemorySample(self.now, phase, *self._memory()))

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
        if phase in (FORWARD, BACKWARD):
            self._begin_pass(what, phase)

    def wait(self, wait: Callable[[], object]) -> None:
        """Call ``wait``, which waits for other ranks; what it takes counts for no pass."""
        before = self._clock()
        wait()
        waited = self._clock() - before
        self.waited += waited
        if self._open is not None:
            planned, captured, start = self._open
            self._open = planned, captured, start + waited

    def _begin_pass(self, what: str, kind: str) -> None:
        planned: Planned = (None, 0, kind)
        captured = self._capturing()
        if self.order:
            iteration, place = divmod(self._begun, len(self.order))
            planned, captured = self.order[place], iteration >= self._warm_ups
        self._begun += 1
        phase = "capture" if captured else "warm-up"
        if captured or not self.samples or self.samples[-1].phase != phase:
            self.sample(phase)
        if self._progress is None:
            self._progress = Progress(len(self.order) * (self._warm_ups + 1) or None)
        name = what if planned[0] is None else self._names[planned[0]]
        self._progress.begin(f"{name}, {kind} {phase}")
        self._open = planned, captured, self._clock()

    @staticmethod
    def _capturing() -> bool:
        return torch.cuda.is_current_stream_capturing()

    def _end_pass(self) -> None:
        if self._open is None:
            return
        (layer, micro_batch, kind), captured, start = self._open
        self._open = None
        seconds = self._clock() - start
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
