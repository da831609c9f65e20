"""Shapes that training has changed to, agreed on by all ranks, which then capture graphs again together."""

from collections.abc import Sequence

import torch

from megatron.core.num_microbatches_calculator import get_num_microbatches

from ..eager_passes import EagerPasses
from ..flags.own import CAPTURES_FLAG, max_captures
from .stage import Stage

# Ranks agree on a new shape once so many steps in succession had it, in all micro-batches. It is about the number of
# steps after which a capture has gained what it cost (docs/performance.md: 0.9 s for 0.11 s a step), and
# shapes that take turns are not captured again and again.
STEPS = 10


class ChangedShapes:
    """Finds out whether all ranks have trained with another shape than at capture for ``STEPS`` steps.

    Every ``STEPS`` steps ranks compare shapes, without waiting: the result is read a step later. Until a device has
    run the comparison its host waits for no other rank.

    Args:
        passes: The passes that ran eagerly on this rank.
        tokens: Tokens of a sequence at capture, on this rank.
        calls: How many of these a micro-batch has.
        groups: Process groups that connect all ranks with graphs, one after the other; None if graphs are kept.
        num_microbatches: Micro-batches of the first step.
    """

    def __init__(
        self,
        passes: EagerPasses,
        tokens: int,
        calls: int,
        groups: Sequence[torch.distributed.ProcessGroup] | None,
        num_microbatches: int,
    ):
        self.passes, self.tokens, self._calls = passes, tokens, calls
        self._groups = None if groups is None else [group for group in groups if group.size() > 1]
        self._steps, self._microbatches = 1, num_microbatches
        self._bounds: torch.Tensor | None = None
        self._stream = torch.cuda.Stream()

    def before_step(self, num_microbatches: int) -> tuple[int, int] | None:
        """Return the shape to capture graphs for, or None. All ranks must call it before each step but the first.

        Args:
            num_microbatches: Micro-batches of the coming step.
        """
        if self._groups is None:
            return None
        agreed = None if self._bounds is None else self._agreed(self._bounds)
        self._bounds = None
        if self._steps == STEPS:
            self._bounds = self._compared(self.passes.shape_of_all(self._microbatches * self._calls) or (0, 0))
            self._steps = self._microbatches = 0
        self._steps += 1
        self._microbatches += num_microbatches
        return agreed

    def _compared(self, shape: tuple[int, int]) -> torch.Tensor:
        """The maxima of ``shape`` and of ``-shape`` over all ranks, int64 ``[2, 2]``."""
        tokens, sequences = shape
        with torch.cuda.stream(self._stream):  # not after the work of the step
            bounds = torch.tensor([[tokens, sequences], [-tokens, -sequences]], device="cuda")
            for group in self._groups or ():
                torch.distributed.all_reduce(bounds, torch.distributed.ReduceOp.MAX, group)
        return bounds

    def _agreed(self, bounds: torch.Tensor) -> tuple[int, int] | None:
        with torch.cuda.stream(self._stream):
            (tokens, sequences), lowest = bounds.tolist()
        return (tokens, sequences) if tokens and lowest == [-tokens, -sequences] else None


class Recaptures:
    """The captures of ``stage`` after the first one."""

    def __init__(self, stage: Stage):
        self._stage = stage
        self._failed = False
        self.done = 0

    def begin(self) -> None:
        """Count one that begins."""
        self.done += 1

    def stop(self) -> None:
        """Allow no other, as one for another shape has failed."""
        self._failed = True

    def are_left(self) -> bool:
        """Whether there may be another."""
        return not self._failed and self.done + 1 < max_captures(self._stage.config)

    def why_none(self) -> str:
        """Return a log suffix: why there will be no other."""
        if self._failed:
            return ", as a capture for another shape has failed"
        allowed = max_captures(self._stage.config)
        return f", as graphs have been captured as often as {CAPTURES_FLAG} {allowed} allows"

    def watch(self, tokens: int, calls: int) -> ChangedShapes:
        """Watch passes of other shapes than that of the graphs that are about to be attached.

        Args:
            tokens: Tokens of a sequence in that shape, on this rank.
            calls: How often the passes of one micro-batch are counted.
        """
        # In a pipeline other stages would have to agree, too. How many tokens images have says nothing of later steps.
        fits, left = self._stage.role.language and self._stage.groups.pp.size() == 1, self.are_left()
        outlook = f", until all steps have had one shape, {STEPS} or more: then graphs are captured for it"
        groups = (self._stage.groups.tp, self._stage.groups.dp_cp) if fits and left else None
        passes = EagerPasses((outlook if left else self.why_none()) if fits else "")
        return ChangedShapes(passes, tokens, calls, groups, get_num_microbatches())
