"""Record losses, gradient norms and times of steps when ``megatron.training`` logs them."""

import functools
import gc
import inspect
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from megatron.training import training


class Recorder:
    """Records each training step without synchronizing: copies losses on the GPU, and reads them at the end.

    Args:
        after_step: Called with the number of each recorded step, from 1.
    """

    def __init__(self, after_step: Callable[[int], None] = lambda step: None):
        self.times: list[float] = []
        self._losses: list[torch.Tensor | None] = []
        self._norms: list[float | torch.Tensor | None] = []
        self._first = 1
        self._after_step = after_step

    def record(self, step: int, losses: dict[str, torch.Tensor], grad_norm: Any) -> None:
        """Record a step; ``losses`` has 'lm loss', a float tensor with one element."""
        if not self.times:
            self._first = step
        self.times.append(time.perf_counter())
        # The next replay overwrites the outputs of a graph.
        self._losses.append(losses["lm loss"].detach().clone() if losses else None)
        self._norms.append(grad_norm.detach().clone() if isinstance(grad_norm, torch.Tensor) else grad_norm)
        self._after_step(step)

    def numbers(self) -> list[list[str | None]]:
        """Return the exact loss and gradient norm of each step (``float.hex``)."""
        return [[_hex(loss), _hex(norm)] for loss, norm in zip(self._losses, self._norms, strict=True)]

    def milliseconds(self, first: int, last: int, *, every: int = 1) -> dict[str, float]:
        """Return the median, mean, minimum and maximum step time, in milliseconds, from step ``first`` to ``last``.

        Steps are numbered from 1. The first recorded step is not timed, because timing starts at its end.

        Args:
            first, last: Range of steps.
            every: Logging interval. Only steps that log synchronize, so each time is the mean over one interval.

        Raises:
            ValueError: The range has fewer than two steps that log.
        """
        lines = [step for step in range(max(first - 1, self._first), last + 1) if step % every == 0]
        if len(lines) < 2:
            raise ValueError(
                f"--log-interval {every} prints fewer than two lines from step {first} to {last}: train more steps"
            )
        ends = [self.times[step - self._first] for step in lines]
        each = [(after - before) * 1000 / every for before, after in pairwise(ends)]
        summary = {"ms": statistics.median(each), "ms_mean": statistics.mean(each), "ms_min": min(each)}
        return {name: round(value, 3) for name, value in {**summary, "ms_max": max(each)}.items()}


def _hex(value: float | torch.Tensor | None) -> str | None:
    return None if value is None else float(value).hex()


class TrainingLog:
    """Wraps ``training_log`` of ``megatron.training`` for the rest of the process.

    Attributes:
        recorder: Recorder to call after each step; None to record nothing.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        original = training.training_log
        signature = inspect.signature(original)

        @functools.wraps(original)
        def training_log(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self.recorder is not None:
                given = signature.bind(*args, **kwargs).arguments
                self.recorder.record(given["iteration"], given["loss_dict"], given["grad_norm"])
            return result

        training.training_log = training_log


class CaptureClock:
    """Measures the time of captures by ``TECudaGraphHelper.create_cudagraphs`` and ``torch.cuda.graph``.

    Attributes:
        seconds: Total time in seconds.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._start = 0.0

    def install(self) -> None:
        """Start measuring, for the rest of the process."""
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        helper_class: Any = TECudaGraphHelper
        create = helper_class.create_cudagraphs
        enter, leave = torch.cuda.graph.__enter__, torch.cuda.graph.__exit__

        @functools.wraps(create)
        def create_cudagraphs(helper: Any) -> Any:
            self._begin()
            try:
                return create(helper)
            finally:
                self._end()

        @functools.wraps(enter)
        def __enter__(context: Any) -> Any:
            self._begin()
            return enter(context)

        @functools.wraps(leave)
        def __exit__(context: Any, *error: Any) -> Any:
            try:
                return leave(context, *error)
            finally:
                self._end()

        helper_class.create_cudagraphs = create_cudagraphs
        torch.cuda.graph.__enter__, torch.cuda.graph.__exit__ = __enter__, __exit__

    def _begin(self) -> None:
        if self._depth == 0:
            torch.cuda.synchronize()
            self._start = time.perf_counter()
        self._depth += 1

    def _end(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            torch.cuda.synchronize()
            self.seconds += time.perf_counter() - self._start


def count_graphs() -> int:
    """Return the number of CUDA graphs in this process after garbage collection."""
    gc.collect()
    return sum(issubclass(type(found), torch.cuda.CUDAGraph) for found in gc.get_objects())
