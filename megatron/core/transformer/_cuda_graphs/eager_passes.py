"""Training passes that have graphs and run eagerly, because they are of another shape than at capture."""

from collections import Counter


class EagerPasses:
    """Counts passes of other shapes than at capture; a shape is ``(tokens, sequences)`` of the hidden states.

    Args:
        outlook: Says in logs how long such passes run eagerly.

    Attributes:
        total: How many there were, and of calls that graphs do not fit for another reason.
    """

    def __init__(self, outlook: str = ""):
        self.outlook = outlook
        self.total = 0
        self._counts: Counter[tuple[int, int]] = Counter()
        self._seen: set[tuple[int, int]] = set()

    def note(self, tokens: int, sequences: int) -> bool:
        """Count a pass; return whether it is the first one of its shape."""
        shape = tokens, sequences
        self._counts[shape] += 1
        self.total += 1
        first = shape not in self._seen
        self._seen.add(shape)
        return first

    def shape_of_all(self, count: int) -> tuple[int, int] | None:
        """Return the shape of the passes since the last call if all had the same and there were ``count``, or None."""
        counts, self._counts = self._counts, Counter()
        return next((shape for shape, of_shape in counts.items() if len(counts) == 1 and of_shape == count), None)
