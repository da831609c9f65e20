"""Training passes that have graphs and run eagerly, because the graphs do not fit them."""

from collections import Counter


class EagerPasses:
    """Counts eager passes; a shape is ``(tokens, sequences)`` of the hidden states.

    Args:
        outlook: Says in logs how long passes of another shape than at capture run eagerly.

    Attributes:
        total: How many there were.
        reason: Why the last one ran eagerly.
    """

    def __init__(self, outlook: str = ""):
        self.outlook = outlook
        self.total = 0
        self.reason = ""
        self._counts: Counter[tuple[int, int]] = Counter()
        self._reasons: set[str] = set()

    def note(self, reason: str, shape: tuple[int, int] | None = None) -> bool:
        """Count a pass; return whether it is the first one with this ``reason``.

        Args:
            shape: Its shape, if it is another one than at capture and may be captured.
        """
        self.total += 1
        self.reason = reason
        if shape is not None:
            self._counts[shape] += 1
        first = reason not in self._reasons
        self._reasons.add(reason)
        return first

    def shape_of_all(self, count: int) -> tuple[int, int] | None:
        """Return the shape of the passes since the last call if all had the same and there were ``count``, or None."""
        counts, self._counts = self._counts, Counter()
        return next((shape for shape, of_shape in counts.items() if len(counts) == 1 and of_shape == count), None)
