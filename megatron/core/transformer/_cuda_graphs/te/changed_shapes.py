"""Decide when to recapture graphs for a new shape, and limit the number of recaptures."""

from collections.abc import Sequence

import torch

from megatron.core.num_microbatches_calculator import get_num_microbatches

from ..eager_passes import EagerPasses
from ..flags.options import CAPTURES_FLAG, max_captures
from .stage import Stage

# The number of consecutive steps in which all micro-batches must have a new shape before it is captured. A recapture
# pays off after about this many steps (docs/results.md: 0.9 s for 0.11 s per step), and alternating shapes do not
# cause repeated captures.
STEPS = 10


class ChangedShapes:
    """Detects that all ranks have trained with the same new shape for ``STEPS`` steps.

    Ranks compare shapes every ``STEPS`` steps. The comparison runs on a side stream and is read one step later, so the
    host never waits for the step itself.

    Args:
        passes: Counter of eager passes on this rank, by shape.
        tokens: Captured tokens per sequence on this rank.
        calls: The number of forward graphs that each micro-batch runs; ``passes`` counts one pass for each.
        groups: Process groups that together connect all ranks of a pipeline stage.
        num_microbatches: The number of micro-batches in the first step.
        recaptures: Whether recaptures for new shapes are allowed.
    """

    def __init__(
        self,
        passes: EagerPasses,
        tokens: int,
        calls: int,
        groups: Sequence[torch.distributed.ProcessGroup],
        num_microbatches: int,
        recaptures: bool,
    ):
        self.passes, self.tokens, self._calls = passes, tokens, calls
        self._groups = [group for group in groups if group.size() > 1]
        self._recaptures = recaptures
        self._steps, self._microbatches = 1, num_microbatches
        self._bounds: torch.Tensor | None = None
        self._stream = torch.cuda.Stream()

    def before_step(self, num_microbatches: int) -> tuple[int, int] | None:
        """Return the shape to recapture for, or None. All ranks must call this before each step except the first."""
        if not self._recaptures:
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
        """Return the maxima over all ranks of ``shape`` and ``-shape``, to compare the shapes of all ranks."""
        tokens, sequences = shape
        with torch.cuda.stream(self._stream):  # does not wait for the step
            bounds = torch.tensor([tokens, sequences, -tokens, -sequences], device="cuda")
            for group in self._groups:
                torch.distributed.all_reduce(bounds, torch.distributed.ReduceOp.MAX, group)
        return bounds

    def _agreed(self, bounds: torch.Tensor) -> tuple[int, int] | None:
        with torch.cuda.stream(self._stream):
            tokens, sequences, *lowest = bounds.tolist()
        return (tokens, sequences) if tokens and lowest == [-tokens, -sequences] else None


class Recaptures:
    """Counts and limits the recaptures of ``stage``."""

    def __init__(self, stage: Stage):
        self._stage = stage
        self._failed = False
        self.done = 0

    def begin(self) -> None:
        """Count a recapture that is about to start."""
        self.done += 1

    def stop(self) -> None:
        """Disallow recaptures after a recapture for a new shape has failed."""
        self._failed = True

    def are_left(self) -> bool:
        """Return whether a further recapture is allowed."""
        return not self._failed and self.done + 1 < max_captures(self._stage.config)

    def why_none(self) -> str:
        """Return a log suffix that explains why no recapture is allowed."""
        if self._failed:
            return ", because a capture for another shape has failed"
        allowed = max_captures(self._stage.config)
        return f", because {CAPTURES_FLAG} {allowed} allows no more captures"

    def watch(self, tokens: int, calls: int) -> ChangedShapes:
        """Return a detector of passes whose shape differs from the capture about to start; see ``ChangedShapes``."""
        # Pipeline stages would have to agree on the shape, and image shapes do not predict shapes of later steps.
        groups = self._stage.groups
        fits, left = self._stage.role.language and groups.pp.size() == 1, self.are_left()
        outlook = f", until all ranks have trained with the same new shape for {STEPS} steps or more"
        passes = EagerPasses((outlook if left else self.why_none()) if fits else "")
        return ChangedShapes(passes, tokens, calls, (groups.tp, groups.dp_cp), get_num_microbatches(), fits and left)
