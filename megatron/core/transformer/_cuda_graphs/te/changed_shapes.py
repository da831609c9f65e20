"""Compares eager passes across ranks: they agree on a shape to recapture, or name the rank that runs eagerly."""

import logging
from collections.abc import Sequence

import torch
from torch.distributed import PrefixStore, Store, distributed_c10d

from megatron.core.num_microbatches_calculator import get_num_microbatches

from ..eager_passes import EagerPasses
from ..flags.options import CAPTURES_FLAG, max_captures
from .stage import Stage

# Ranks agree on a new shape once so many steps in succession had it, in all micro-batches. It is about the number of
# steps after which a capture has gained what it cost (docs/results.md: 0.9 s for 0.11 s a step), and
# shapes that take turns are not captured again and again.
STEPS = 10
logger = logging.getLogger("megatron.core.transformer.cuda_graphs")


class ChangedShapes:
    """Finds out whether all ranks have trained with another shape than at capture for ``STEPS`` steps.

    Every ``STEPS`` steps ranks compare shapes, without waiting: the result is read a step later. Until a device has
    run the comparison its host waits for no other rank. A rank that has run passes eagerly in several steps gives its
    reason, which the others log: they wait for it.

    Args:
        passes: The passes that ran eagerly on this rank.
        tokens: Tokens of a sequence at capture, on this rank.
        calls: How many of these a micro-batch has.
        groups: Process groups that connect all ranks of a pipeline stage, one after the other.
        num_microbatches: Micro-batches of the first step.
        captures_again: Whether graphs may be captured for another shape.
    """

    def __init__(
        self,
        passes: EagerPasses,
        tokens: int,
        calls: int,
        groups: Sequence[torch.distributed.ProcessGroup],
        num_microbatches: int,
        captures_again: bool,
    ):
        self.passes, self.tokens, self._calls = passes, tokens, calls
        self._groups = [group for group in groups if group.size() > 1]
        self._captures_again = captures_again
        self._steps, self._microbatches = 1, num_microbatches
        self._eager_passes = self._eager_steps = self._eager_steps_compared = 0
        self._bounds: torch.Tensor | None = None
        self._stream = torch.cuda.Stream()
        self._waits = False  # at the last comparison
        self._told: set[int] = set()  # the ranks whose reason was logged, each plus one

    def before_step(self, num_microbatches: int) -> tuple[int, int] | None:
        """Return the shape to capture graphs for, or None. All ranks must call it before each step but the first.

        Args:
            num_microbatches: Micro-batches of the coming step.
        """
        if not (self._groups or self._captures_again):
            return None
        agreed = None if self._bounds is None else self._agreed(self._bounds)
        self._bounds = None
        self._eager_steps += self.passes.total != self._eager_passes
        self._eager_passes = self.passes.total
        if self._steps == STEPS:
            self._bounds = self._compared(self.passes.shape_of_all(self._microbatches * self._calls) or (0, 0))
            self._steps = self._microbatches = 0
        self._steps += 1
        self._microbatches += num_microbatches
        return agreed

    def _compared(self, shape: tuple[int, int]) -> torch.Tensor:
        """Return the maxima over all ranks of ``shape``, ``-shape``, and rank plus one where passes ran eagerly."""
        eager = 0
        if self._groups and self._eager_steps > max(1, self._eager_steps_compared):
            eager = torch.distributed.get_rank() + 1
            _reasons().set(str(eager), self.passes.reason)
        self._waits = not eager
        self._eager_steps_compared = self._eager_steps
        tokens, sequences = shape
        with torch.cuda.stream(self._stream):  # not after the work of the step
            bounds = torch.tensor([tokens, sequences, -tokens, -sequences, eager], device="cuda")
            for group in self._groups:
                torch.distributed.all_reduce(bounds, torch.distributed.ReduceOp.MAX, group)
        return bounds

    def _agreed(self, bounds: torch.Tensor) -> tuple[int, int] | None:
        with torch.cuda.stream(self._stream):
            tokens, sequences, *lowest, eager = bounds.tolist()
        if eager and self._waits and eager not in self._told:
            self._told.add(eager)
            reason = _reasons().get(str(eager)).decode()
            if all(group.rank() == 0 for group in self._groups):
                waited_for = f"rank {eager - 1}, which runs passes eagerly: {reason}"
                logger.warning(f"Other ranks wait for {waited_for}")
        return (tokens, sequences) if self._captures_again and tokens and lowest == [-tokens, -sequences] else None


def _reasons() -> Store:
    """Return the store of the reasons why ranks run eagerly, by rank plus one."""
    return PrefixStore("cuda_graph_eager_passes", distributed_c10d._get_default_store())


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
        groups = self._stage.groups
        fits, left = self._stage.role.language and groups.pp.size() == 1, self.are_left()
        outlook = f", until all steps have had one shape, {STEPS} or more: then graphs are captured for it"
        passes = EagerPasses((outlook if left else self.why_none()) if fits else "")
        compared = (groups.tp, groups.dp_cp) if self._stage.role.language else ()
        return ChangedShapes(passes, tokens, calls, compared, get_num_microbatches(), captures_again=fits and left)
