"""Replaces names of torch, lists all replaced names with the reasons, and restores them."""

import functools
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Patch:
    """One replaced name: its full name, its value before and now, the reason, and a call that restores it."""

    name: str
    original: Any
    replacement: Any
    reason: str
    undo: Callable[[], object]

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


APPLIED: list[Patch] = []


def patch(owner: Any, name: str, value: Any, reason: str) -> None:
    """Set ``owner.name`` to ``value`` and note it in ``APPLIED``."""
    patcher: Any = mock.patch.object(owner, name, value, create=not hasattr(owner, name))
    original, _ = patcher.get_original()
    patcher.__enter__()
    undo = functools.partial(patcher.__exit__, None, None, None)
    APPLIED.append(Patch(f"{owner.__name__}.{name}", original, getattr(owner, name), reason, undo))


def patch_entry(mapping: MutableMapping[str, Any], where: str, key: str, value: Any, reason: str) -> None:
    """Set ``mapping[key]`` and note it in ``APPLIED``."""
    before = mapping.get(key)
    mapping[key] = value
    undo: Any = functools.partial(mapping.pop, key)
    if before is not None:
        undo = functools.partial(mapping.__setitem__, key, before)
    APPLIED.append(Patch(f"{where}.{key}", before, value, reason, undo))


def wrapping(call: Callable, around: Callable) -> Callable:
    """Return a replacement of ``call`` that runs ``around``, with ``call`` in front of the arguments."""

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(call, *args, **kwargs)

    return wrapped


def wrap(owner: Any, name: str, around: Callable, reason: str) -> None:
    """Run ``around`` where ``owner.name`` is called; see ``wrapping`` and ``patch``."""
    patch(owner, name, wrapping(getattr(owner, name), around), reason)


def rebind_early_names() -> None:
    """Give the replacements to modules of megatron that hold torch's functions under names of their own."""
    _rebind({id(p.original): p.replacement for p in APPLIED if callable(p.original)})


def undo_all() -> None:
    """Restore every replaced name, in the modules of megatron too."""
    # Functions and plain classes are the backend's own; other values may be torch's, with other names too.
    own = [p for p in APPLIED if type(p.replacement) in (FunctionType, type) and callable(p.original)]
    while APPLIED:
        APPLIED.pop().undo()
    _rebind({id(p.replacement): p.original for p in own})


def _rebind(replaced: dict[int, Any]) -> None:
    for module_name, module in list(sys.modules.items()):
        if module is not None and module_name.split(".")[0] == "megatron":
            for name, value in list(vars(module).items()):
                if id(value) in replaced:
                    setattr(module, name, replaced[id(value)])
