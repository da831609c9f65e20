"""Replaces names of torch, and keeps the list of all that were replaced."""

import functools
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """One replaced attribute: where, its name, the value ``owner`` answered with before, and why it was replaced.

    ``is_own`` tells whether that value was the owner's own, not inherited or missing.
    """

    owner: Any
    name: str
    original: Any
    is_own: bool
    reason: str

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}: {self.reason}"

    def undo(self) -> None:
        """Put the old value back."""
        if self.is_own:
            setattr(self.owner, self.name, self.original)
            return
        delattr(self.owner, self.name)
        if self.original is not _MISSING and not hasattr(self.owner, self.name):
            setattr(self.owner, self.name, self.original)  # a module that computes its names hides what is deleted


class Entries:
    """The entries of a mapping as attributes, so that they are replaced and noted like every other name."""

    def __init__(self, mapping: MutableMapping[str, Any], name: str) -> None:
        vars(self).update(_mapping=mapping, __name__=name)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._mapping[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._mapping[name] = value

    def __delattr__(self, name: str) -> None:
        del self._mapping[name]


APPLIED: list[Patch] = []


def patch(owner: Any, name: str, value: Any, reason: str) -> None:
    """Set ``owner.name`` to ``value`` and note it in ``APPLIED``."""
    is_own = name in vars(owner)
    # vars() keeps a staticmethod or property as what it is
    original = vars(owner)[name] if is_own else getattr(owner, name, _MISSING)
    APPLIED.append(Patch(owner, name, original, is_own, reason))
    setattr(owner, name, value)


def wrapping(call: Callable, around: Callable) -> Callable:
    """Return a function in the place of ``call``: ``around``, which gets ``call`` in front of the arguments."""

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(call, *args, **kwargs)

    return wrapped


def wrap(owner: Any, name: str, around: Callable, reason: str) -> None:
    """Let ``around`` run where ``owner.name`` is called; see ``wrapping`` and ``patch``."""
    patch(owner, name, wrapping(getattr(owner, name), around), reason)


def rebind_early_names() -> None:
    """Give modules of megatron that were imported before the patches the replaced functions and classes.

    They hold torch's under names of their own (``from torch.distributed import new_group``).
    """
    _rebind({id(p.original): getattr(p.owner, p.name) for p in APPLIED if callable(p.original)})


def undo_all() -> None:
    """Put every replaced name back, in the modules of megatron too."""
    ours = [(getattr(p.owner, p.name), p.original) for p in reversed(APPLIED)]
    # functions and plain classes are the backend's own; other values may be torch's, known by other names too
    originals = {id(new): old for new, old in ours if type(new) in (FunctionType, type) and callable(old)}
    while APPLIED:
        APPLIED.pop().undo()
    _rebind(originals)


def _rebind(replaced: dict[int, Any]) -> None:
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.split(".")[0] != "megatron":
            continue
        for name, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])
