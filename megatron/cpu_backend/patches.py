"""The one place through which the backend replaces a name of torch, and the list of all it replaced."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """One replaced attribute: where, its name, the value it had, and why it was replaced."""

    owner: Any
    name: str
    original: Any
    reason: str

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', type(self.owner).__name__)}.{self.name}: {self.reason}"


APPLIED: list[Patch] = []
_MISSING = object()


def patch(owner: Any, name: str, value: Any, reason: str) -> Any:
    """Set ``owner.name`` to ``value`` and return what stood there, or ``None`` where nothing did."""
    original = getattr(owner, name, _MISSING)
    setattr(owner, name, value)
    original = None if original is _MISSING else original
    APPLIED.append(Patch(owner, name, original, reason))
    return original
