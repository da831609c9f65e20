"""Examine a training: its captures, its memory, or checksums of its gradients and weights."""

import cProfile
import io
import pstats
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.training import training

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


class Checksums:
    """Checksums of every gradient and weight of each rank, taken around each step of the optimizer.

    They are computed on the device, so that nothing waits for the host within a forward or backward pass.
    """

    def __init__(self, clock: CaptureClock):
        self._steps: list[dict[str, torch.Tensor]] = []
        self._set_up = training.setup_model_and_optimizer
        training.setup_model_and_optimizer = self._set_up_and_watch

    def _set_up_and_watch(self, *args: Any, **kwargs: Any) -> Any:
        training.setup_model_and_optimizer = self._set_up
        chunks, optimizer, *others = self._set_up(*args, **kwargs)
        run_step = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            grads = ((f"gradient of {name}", _gradient(param)) for name, param in _named_parameters(chunks))
            sums = {name: _checksum(grad) for name, grad in grads if grad is not None}
            result = run_step(*args, **kwargs)
            self._steps.append(sums | {name: _checksum(param) for name, param in _named_parameters(chunks)})
            return result

        optimizer.step = step
        return chunks, optimizer, *others

    def after_step(self, step: int) -> None:
        """Called after each step."""

    def found(self) -> list[dict[str, int]]:
        """Return the checksums of each step, by rank and name."""
        mine = [{name: int(value) for name, value in step.items()} for step in self._steps]
        ranks: list[list[dict[str, int]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, mine)
        return [
            {f"rank {rank}: {name}": value for rank, sums in enumerate(step) for name, value in sums.items()}
            for step in zip(*ranks, strict=True)
        ]


def _named_parameters(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters that the optimizer updates; under DistributedDataParallel, those of the model."""
    for chunk in chunks:
        buffer: Any = getattr(chunk, "param_and_grad_buffer", None)
        yield from chunk.named_parameters() if buffer is None else buffer.optimizer_named_parameters


def _gradient(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that the optimizer reads."""
    grads = (getattr(param, name, None) for name in ("decoupled_grad", "grad", "main_grad"))
    return next((grad for grad in grads if grad is not None), None)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bit patterns, an int64 scalar on its device."""
    local = getattr(tensor, "_local_tensor", tensor).detach()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    return local.contiguous().view(bits).sum(dtype=torch.int64)


EXAMINATIONS: dict[str, Any] = {
    "capture": PhasesOfCapture,
    "functions": FunctionsOfCapture,
    "memory": Memory,
    "checksums": Checksums,
}
