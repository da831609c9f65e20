"""Whether graphs that share memory are replayed in the order of their capture."""

from typing import NoReturn


class ReplayOrder:
    """The order in which the passes of one capture were recorded, and how far its replays are in it.

    Graphs of a capture share memory: one may use what those captured before it have freed. So it may overwrite what
    passes keep that were captured later, and only replays that come in the order of capture leave each other's alone.
    Any may be left out. A replay whose number is not higher than the last one's begins a new *round*, and what passes
    of former rounds have kept is lost. ``Replay`` counts rounds itself, without a call.

    Attributes:
        began: The number of the replay that began the round.
    """

    __slots__ = ("_names", "began", "last", "round")

    def __init__(self) -> None:
        self.last = -1
        self.round = 0
        self.began = -1
        self._names: dict[int, str] = {}

    def number(self, name: str) -> int:
        """Return the next number, that of a pass of the callable ``name``."""
        number = len(self._names)
        self._names[number] = name
        return number

    def rename(self, number: int, name: str) -> None:
        """Let errors call the callable of a pass ``name``."""
        if number in self._names:
            self._names[number] = name

    def name_of(self, number: int, default: str) -> str:
        """Return what errors call the callable of a pass; ``default`` for a pass without a number here."""
        return self._names.get(number, default)

    def refuse(self, number: int, name: str) -> NoReturn:
        """Raise the error about a backward pass whose forward pass was of a former round, or that would begin one.

        Args:
            name: What the error calls its callable, unless ``rename`` was told.

        Raises:
            RuntimeError: names the callable that was replayed instead.
        """
        other = self.name_of(self.last if number <= self.last else self.began, name)
        name = self.name_of(number, name)
        raise RuntimeError(
            f"{name}: backward of a replay whose activations a later replay has overwritten, that of {other}. A graph "
            "serves one forward pass at a time, and one backward pass of it; graphs that are captured together share "
            "memory, and are replayed in the order of capture, where any may be left out. Call layers in that order; "
            "run backward before the next forward, and once (or capture with retain_graph_in_backward=True); or "
            "capture the callable once for each call, with _order and an entry of sample_args for each."
        )
