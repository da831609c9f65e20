"""Attributes that have another value for a time."""

from collections.abc import Callable, Iterable
from typing import Any

_ABSENT = object()


class Replacements:
    """Attributes of objects, classes and modules that have another value in its context, or while installed.

    Other than with ``mock.patch.object``, an attribute of a tensor (``grad``) comes back too, and ``torch.nn.Module``
    is not asked to register what is set.
    """

    def __init__(self) -> None:
        self._all: list[tuple[Any, str, Any, Any]] = []

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Give ``owner`` the attribute ``name`` of this ``value``, when installed."""
        before = getattr(owner, name) if _is_computed(owner, name) else vars(owner).get(name, _ABSENT)
        self._all.append((owner, name, value, before))

    def __enter__(self) -> None:
        try:
            self.install()
        except BaseException:  # Ctrl-C
            self.remove()
            raise

    def __exit__(self, *error: object) -> None:
        self.remove()

    def install(self) -> None:
        """Set all."""
        for owner, name, value, _ in self._all:
            _set(owner, name, value)

    def remove(self) -> None:
        """Set what there was, or nothing."""
        for owner, name, _, before in reversed(self._all):
            if before is not _ABSENT:
                _set(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)


def replaced_attribute(owners: Iterable[Any], name: str, value_of: Callable[[Any], Any]) -> Replacements:
    """Return a context in which the attribute ``name`` of each owner is what ``value_of`` makes of its value."""
    replacements = Replacements()
    for owner in owners:
        replacements.add(owner, name, value_of(getattr(owner, name)))
    return replacements


def _is_computed(owner: Any, name: str) -> bool:
    """Whether the class of ``owner`` sets this attribute by a descriptor, as a tensor's ``grad``."""
    return hasattr(type(owner), name) and hasattr(type(getattr(type(owner), name)), "__set__")


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type) or _is_computed(owner, name):
        setattr(owner, name, value)
    else:
        vars(owner)[name] = value
