"""Counter of training passes that run eagerly because they do not match their graphs."""

from collections import Counter


class EagerPasses:
    """Counts eager passes. A shape is the ``(sequence length, micro-batch size)`` of hidden states.

    Args:
        outlook: A log suffix that describes how long passes with a new shape run eagerly.
    """

    def __init__(self, outlook: str = ""):
        self.outlook = outlook
        self._counts: Counter[tuple[int, int]] = Counter()
        self._reasons: set[str] = set()

    def note(self, reason: str, shape: tuple[int, int] | None = None) -> bool:
        """Count an eager pass; return whether ``reason`` is new. Give ``shape`` only if it differs from capture."""
        if shape is not None:
            self._counts[shape] += 1
        first = reason not in self._reasons
        self._reasons.add(reason)
        return first

    def shape_of_all(self, count: int) -> tuple[int, int] | None:
        """Return the shape with which all ``count`` passes since the last call ran eagerly; None if there is none."""
        counts, self._counts = self._counts, Counter()
        return next((shape for shape, of_shape in counts.items() if len(counts) == 1 and of_shape == count), None)
