"""The recorded order of passes: graphs that share memory must be replayed in the order of their capture."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NoReturn


@dataclass(slots=True, eq=False)
class Turn:
    """The place of a runner in the recorded order. Sets of runners are integers with a bit for each runner.

    Attributes:
        name: The runner's name in errors.
        number: Its place among all forward passes.
        bit: Its bit in such sets; 0 without a backward graph.
        busy_at_forward, busy_at_backward: The runners that were between their forward and backward pass when its own
            pass was recorded. Graphs may use the memory of all others.
    """

    name: str = ""
    number: int = 0
    bit: int = 0
    busy_at_forward: int = -1
    busy_at_backward: int = -1


class Turns:
    """Which runners are between their forward and their backward pass, and which passes may come next.

    Attributes:
        in_flight: The runners that wait for their backward pass.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._turns: dict[Hashable, Turn] = {}

    def take_order(self, record: Sequence[tuple]) -> None:
        """Set the order from the recorded ``(runner, "fwd", ...)`` and ``(runner, "bwd")``."""
        with_backward = {entry[0] for entry in record if entry[1] == "bwd"}
        busy = 0
        self._turns = {}
        for runner, kind, *_ in record:
            if kind == "fwd":
                number = len(self._turns)
                turn = Turn(runner.name, number, 1 << number if runner in with_backward else 0, busy)
                self._turns[runner] = turn
                busy |= turn.bit
            else:
                turn = self._turns[runner]
                busy &= ~turn.bit
                turn.busy_at_backward = busy

    def of(self, runner: Hashable) -> Turn:
        """Return the turn of ``runner``; one that is always allowed if the runner was not recorded."""
        return self._turns.get(runner) or Turn()

    def check_forward(self, turn: Turn) -> None:
        """Check that a forward replay overwrites nothing that a backward pass still reads.

        Raises:
            RuntimeError: a runner that was not in flight when the pass was recorded is now.
        """
        others = self.in_flight & ~turn.busy_at_forward
        if others:
            self._refuse(turn, others)

    def check_backward(self, turn: Turn) -> None:
        """As ``check_forward``, for a backward replay."""
        others = self.in_flight & ~turn.busy_at_backward & ~turn.bit
        if others:
            self._refuse(turn, others)

    def begin(self, turn: Turn) -> None:
        """Note that a forward pass has run whose backward pass is to come."""
        self.in_flight |= turn.bit

    def end(self, turn: Turn) -> None:
        """Note that the backward pass has run."""
        self.in_flight &= ~turn.bit

    def end_all(self) -> None:
        """Clear ``in_flight`` at the end of a step: pending backward passes will not run any more."""
        self.in_flight = 0

    def _refuse(self, turn: Turn, others: int) -> NoReturn:
        other = next(other for other in self._turns.values() if other.bit & others)
        raise RuntimeError(
            f"{turn.name} would overwrite memory of {other.name}, which waits for its backward pass: passes do not "
            "follow each other as in the step that was recorded. With --cuda-graph-impl local every step needs the "
            "same schedule, and under pipeline parallelism no more micro-batches than the first step "
            "(--global-batch-size, --rampup-batch-size)."
        )
