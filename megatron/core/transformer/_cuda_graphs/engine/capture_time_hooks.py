"""The hooks that run around one callable in warm-up and capture, outside the graph."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..hooks import HOOK_KINDS


class CaptureTimeHooks:
    """The hooks that run around one callable in warm-up and capture, outside the graph.

    Args:
        name: What errors call the callable.
        hooks: ``{kind: {id: hook}}`` with the kinds of ``HOOK_KINDS``; None for no hooks.

    Forward-pre hooks are offered ``(module, args, kwargs)``, forward hooks ``(module, args, output)``, the others
    ``(module)``. A hook that takes one argument only gets the module.

    Raises:
        ValueError: an unknown kind.
        TypeError: a hook that cannot be called, or hooks that are in no dict.
    """

    def __init__(self, name: str, hooks: Mapping[str, Mapping[Any, Callable]] | None):
        self._name = name
        self._hooks: dict[str, list[tuple[Callable, bool]]] = {kind: [] for kind in HOOK_KINDS}
        if not isinstance(hooks, Mapping | None):
            raise TypeError(
                f"capture_time_hooks of {name} must be a dict of the keys {HOOK_KINDS} or None, got {hooks!r}"
            )
        for kind, entries in (hooks or {}).items():
            if kind not in HOOK_KINDS:
                raise ValueError(f"capture_time_hooks of {name}: unknown key {kind!r}; the keys are {HOOK_KINDS}")
            if not isinstance(entries, Mapping):
                raise TypeError(f"capture_time_hooks of {name}: {kind} must be a dict of hooks by id, got {entries!r}")
            for key, hook in entries.items():
                if not callable(hook):
                    raise TypeError(f"capture_time_hooks of {name}: {kind}[{key!r}] is not callable: {hook!r}")
                self._hooks[kind].append((hook, kind.startswith("forward") and _takes(hook, 3)))

    def run(self, kind: str, module: Callable, *offered: Any) -> None:
        """Call the hooks of one kind, in order.

        Raises:
            RuntimeError: a hook returned something; what it wants to change is in no graph.
        """
        for hook, takes_all in self._hooks[kind]:
            if (hook(module, *offered) if takes_all else hook(module)) is not None:
                culprit = getattr(hook, "__wrapped__", hook)
                raise RuntimeError(
                    f"capture_time_hooks of {self._name}: {kind} hook {culprit!r} returned a value. Hooks run outside "
                    "the graph and cannot change what it reads or returns; they must return None."
                )


def _takes(hook: Callable, count: int) -> bool:
    try:
        inspect.signature(hook, follow_wrapped=False).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True
