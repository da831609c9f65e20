"""Replace and restore attributes of torch."""

import functools
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Patch:
    """A replaced attribute: its original, its replacement, and a function that restores it."""

    original: Any
    replacement: Any
    undo: Callable[[], object]


APPLIED: list[Patch] = []


def patch(owner: Any, name: str, value: Any) -> None:
    """Set ``owner.name`` to ``value`` until ``undo_all``."""
    patcher: Any = mock.patch.object(owner, name, value, create=not hasattr(owner, name))
    original, _ = patcher.get_original()
    patcher.__enter__()
    APPLIED.append(Patch(original, getattr(owner, name), functools.partial(patcher.__exit__, None, None, None)))


def patch_entry(mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
    """Set ``mapping[key]`` to ``value`` until ``undo_all``."""
    before = mapping.get(key)
    mapping[key] = value
    undo: Any = functools.partial(mapping.pop, key)
    if before is not None:
        undo = functools.partial(mapping.__setitem__, key, before)
    APPLIED.append(Patch(before, value, undo))


def wrapping(call: Callable, around: Callable) -> Callable:
    """Return a replacement for ``call`` that runs ``around(call, *args, **kwargs)``."""

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(call, *args, **kwargs)

    return wrapped


def wrap(owner: Any, name: str, around: Callable) -> None:
    """Wrap ``owner.name`` with ``around`` until ``undo_all``; see ``wrapping``."""
    patch(owner, name, wrapping(getattr(owner, name), around))


def rebind_early_names() -> None:
    """Replace the references to patched torch functions in megatron modules that are already imported."""
    _rebind({id(p.original): p.replacement for p in APPLIED if callable(p.original)})


def undo_all() -> None:
    """Restore every replaced attribute, including references in megatron modules."""
    # Other replacements may be torch's own objects, with unrelated references.
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
