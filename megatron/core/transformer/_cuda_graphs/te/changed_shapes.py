"""Shapes that training has changed to, agreed on by all ranks, so that they capture graphs again together."""

from collections.abc import Sequence

import torch

from ..eager_passes import EagerPasses

# Ranks agree on a new shape once so many steps in succession had it, in all micro-batches. It is about the number of
# steps after which a capture has gained what it cost (benchmarks/results/step_time.json: 1.1 s for 0.11 s a step), and
# shapes that take turns are not captured again and again.
STEPS = 10


class ChangedShapes:
    """Finds out whether all ranks have trained with another shape than at capture for ``STEPS`` steps.

    Every ``STEPS`` steps ranks compare shapes, without waiting: the result is read a step later. Until a device has
    run the comparison its host waits for no other rank.

    Args:
        passes: The passes that ran eagerly on this rank.
        calls: How many of these a micro-batch has.
        groups: Process groups that connect all ranks with graphs, one after the other.
        num_microbatches: Micro-batches of the first step.
    """

    def __init__(
        self,
        passes: EagerPasses,
        calls: int,
        groups: Sequence[torch.distributed.ProcessGroup],
        num_microbatches: int,
    ):
        self._passes, self._calls = passes, calls
        self._groups = [group for group in groups if group.size() > 1]
        self._steps, self._microbatches = 1, num_microbatches
        self._bounds: torch.Tensor | None = None
        self._stream = torch.cuda.Stream()

    def before_step(self, num_microbatches: int) -> tuple[int, int] | None:
        """Return the shape to capture graphs for, or None. All ranks must call it before each step but the first.

        Args:
            num_microbatches: Micro-batches of the coming step.
        """
        agreed = None if self._bounds is None else self._agreed(self._bounds)
        self._bounds = None
        if self._steps == STEPS:
            self._bounds = self._compared(self._passes.shape_of_all(self._microbatches * self._calls) or (0, 0))
            self._steps = self._microbatches = 0
        self._steps += 1
        self._microbatches += num_microbatches
        return agreed

    def _compared(self, shape: tuple[int, int]) -> torch.Tensor:
        """The maxima of ``shape`` and of ``-shape`` over all ranks, int64 ``[2, 2]``."""
        tokens, sequences = shape
        with torch.cuda.stream(self._stream):  # not after the work of the step
            bounds = torch.tensor([[tokens, sequences], [-tokens, -sequences]], device="cuda")
            for group in self._groups:
                torch.distributed.all_reduce(bounds, torch.distributed.ReduceOp.MAX, group)
        return bounds

    def _agreed(self, bounds: torch.Tensor) -> tuple[int, int] | None:
        with torch.cuda.stream(self._stream):
            (tokens, sequences), lowest = bounds.tolist()
        return (tokens, sequences) if tokens and lowest == [-tokens, -sequences] else None
