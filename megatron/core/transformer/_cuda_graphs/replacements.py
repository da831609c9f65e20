"""Temporary replacements of attributes and modes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


class Replacements:
    """Context in which attributes of objects, classes and modules have other values.

    Unlike ``mock.patch.object``, it also restores attributes of tensors (``grad``), and it bypasses the registration of
    ``torch.nn.Module``.
    """

    def __init__(self) -> None:
        self._all: list[tuple[Any, str, Any, Any]] = []
        self._computed: set[tuple[type, str]] = set()

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Set the attribute ``name`` of ``owner`` to ``value`` in the context."""
        kind = type(owner)
        # Set by a descriptor, as a tensor's ``grad`` is.
        if hasattr(type(getattr(kind, name, None)), "__set__"):
            self._computed.add((kind, name))
            before = getattr(owner, name)
        else:
            before = vars(owner).get(name, _ABSENT)
        self._all.append((owner, name, value, before))

    def __enter__(self) -> None:
        try:
            for owner, name, value, _ in self._all:
                self._set(owner, name, value)
        except BaseException:  # Ctrl-C
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        for owner, name, _, before in reversed(self._all):
            if before is not _ABSENT:
                self._set(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        if isinstance(owner, type) or (type(owner), name) in self._computed:
            setattr(owner, name, value)
        else:
            vars(owner)[name] = value


def replaced_attribute(owners: Iterable[Any], name: str, value_of: Callable[[Any], Any]) -> Replacements:
    """Return a context in which the attribute ``name`` of each owner is ``value_of`` its own value."""
    replacements = Replacements()
    for owner in owners:
        replacements.add(owner, name, value_of(getattr(owner, name)))
    return replacements


class TakenForward:
    """Replaces ``module.forward`` until ``end``; the module's hooks still run around it.

    Graphs replace a module's code in no other way. A ``module.forward`` that the user sets meanwhile stays.
    """

    def __init__(self, module: Any, forward: Callable[..., Any]):
        self._own, self._forward = vars(module), forward
        self._before = self._own.get("forward", _ABSENT)  # a compiled or wrapped one
        self._own["forward"] = forward

    def end(self) -> None:
        """Restore the module's own ``forward``."""
        if self._own.get("forward") is not self._forward:
            return
        if self._before is _ABSENT:
            del self._own["forward"]
        else:
            self._own["forward"] = self._before


@contextmanager
def between(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """Call ``begin``, and ``end`` when this context ends, also after an exception."""
    begin()
    try:
        yield
    finally:
        end()
