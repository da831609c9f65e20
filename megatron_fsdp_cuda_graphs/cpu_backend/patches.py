"""Replace attributes of torch."""

import functools
import sys
from collections.abc import Callable
from typing import Any

_REPLACED: dict[int, tuple[Any, Any]] = {}


def patch(owner: Any, name: str, value: Any) -> None:
    """Set ``owner.name`` to ``value``."""
    original = getattr(owner, name, None)
    setattr(owner, name, value)
    if callable(original):
        _REPLACED[id(original)] = original, getattr(owner, name)


def wrapping(call: Callable, around: Callable) -> Callable:
    """Return a replacement for ``call`` that runs ``around(call, *args, **kwargs)``."""

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(call, *args, **kwargs)

    return wrapped


def wrap(owner: Any, name: str, around: Callable) -> None:
    """Wrap ``owner.name`` with ``around``; see ``wrapping``."""
    patch(owner, name, wrapping(getattr(owner, name), around))


def rebind_early_names() -> None:
    """Replace the references to patched torch functions in megatron modules that are already imported."""
    for module_name, module in list(sys.modules.items()):
        if module is not None and module_name.split(".")[0] == "megatron":
            for name, value in list(vars(module).items()):
                if id(value) in _REPLACED:
                    setattr(module, name, _REPLACED[id(value)][1])
