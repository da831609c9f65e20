"""Temporary replacements of attributes and modes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


class Replacements:
    """Context manager that temporarily replaces attributes of objects, classes and modules.

    Unlike ``mock.patch.object``, it restores tensor attributes (``grad``) and bypasses ``torch.nn.Module``'s
    registration.
    """

    def __init__(self) -> None:
        self._all: list[tuple[Callable[[Any, str, Any], None], Any, str, Any, Any]] = []

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Set the attribute ``name`` of ``owner`` to ``value`` within the context."""
        computed = hasattr(type(getattr(type(owner), name, None)), "__set__")  # by a descriptor, like a tensor's grad
        before = getattr(owner, name) if computed else vars(owner).get(name, _ABSENT)
        write = setattr if computed or isinstance(owner, type) else _write
        self._all.append((write, owner, name, value, before))

    def __enter__(self) -> None:
        try:
            for write, owner, name, value, _ in self._all:
                write(owner, name, value)
        except BaseException:  # Ctrl-C
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        for write, owner, name, _, before in reversed(self._all):
            if before is not _ABSENT:
                write(owner, name, before)
            elif name in vars(owner):
                delattr(owner, name)


def _write(owner: Any, name: str, value: Any) -> None:
    vars(owner)[name] = value


def replaced_attribute(owners: Iterable[Any], name: str, value_of: Callable[[Any], Any]) -> Replacements:
    """Return a context manager that replaces the attribute ``name`` of each owner with ``value_of(original)``."""
    replacements = Replacements()
    for owner in owners:
        replacements.add(owner, name, value_of(getattr(owner, name)))
    return replacements


class TakenForward:
    """Replaces ``module.forward`` until ``end``; the module's hooks still run.

    ``end`` keeps a ``forward`` that the user has set in the meantime.
    """

    def __init__(self, module: Any, forward: Callable[..., Any]):
        self._own, self._forward = vars(module), forward
        self._before = self._own.get("forward", _ABSENT)  # for example a compiled or wrapped ``forward``
        self._own["forward"] = forward

    def end(self) -> None:
        """Restore the original ``forward``."""
        if self._own.get("forward") is not self._forward:
            return
        if self._before is _ABSENT:
            del self._own["forward"]
        else:
            self._own["forward"] = self._before


@contextmanager
def between(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """Context manager that calls ``begin`` on entry and ``end`` on exit, even after an exception."""
    begin()
    try:
        yield
    finally:
        end()
