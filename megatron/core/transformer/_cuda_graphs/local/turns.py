"""The recorded order of passes: graphs that share memory must be replayed in the order of their capture."""

from dataclasses import dataclass
from typing import NoReturn


@dataclass(slots=True, eq=False)
class Turn:
    """The place of a runner in the recorded order. Sets of runners are integers with a bit for each runner.

    Attributes:
        bit: Its bit in such sets, the higher the later its forward pass; 0 if it was not recorded.
        busy_at_forward, busy_at_backward: The runners that were between their forward and backward pass when its own
            pass was recorded. Graphs may use the memory of all others.
    """

    name: str = ""
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
        self._recorded: list[Turn] = []

    def record_forward(self, name: str) -> Turn:
        """Return the turn of a runner with this name, whose forward pass runs now in the step that is recorded."""
        turn = Turn(name, 1 << len(self._recorded), self.in_flight)
        self._recorded.append(turn)
        self.begin(turn)
        return turn

    def record_backward(self, turn: Turn) -> None:
        """Note that the backward pass runs now in the step that is recorded."""
        self.end(turn)
        turn.busy_at_backward = self.in_flight

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

    def _refuse(self, turn: Turn, others: int) -> NoReturn:
        other = next(other for other in self._recorded if other.bit & others)
        raise RuntimeError(
            f"{turn.name} would overwrite memory of {other.name}, which waits for its backward pass: passes do not "
            "follow each other as in the step that was recorded. With --cuda-graph-impl local every step needs the "
            "same schedule, and under pipeline parallelism no more micro-batches than the first step "
            "(--global-batch-size, --rampup-batch-size)."
        )
