"""Hooks that run around a callable in warm-up and capture, outside the graph."""

from collections.abc import Callable, Mapping
from typing import Any

from ..hooks import HOOK_KINDS


class CaptureTimeHooks:
    """Runs hooks around one callable in warm-up and capture, outside the graph.

    Forward-pre hooks are called with ``(module, args, kwargs)``, forward hooks with ``(module, args, output)``, and
    backward hooks with ``(module)``.

    Args:
        hooks: ``{kind: {id: hook}}``, with kinds from ``HOOK_KINDS``; None for no hooks.

    Raises:
        ValueError: A kind is unknown.
        TypeError: A hook is not callable, or hooks are not in a dict.
    """

    def __init__(self, name: str, hooks: Mapping[str, Mapping[Any, Callable]] | None):
        self._name = name
        self._hooks: dict[str, list[Callable]] = {kind: [] for kind in HOOK_KINDS}
        if not isinstance(hooks, Mapping | None):
            raise TypeError(
                f"capture_time_hooks of {name} must be a dict with the keys {HOOK_KINDS} or None, got {hooks!r}"
            )
        for kind, entries in (hooks or {}).items():
            if kind not in HOOK_KINDS:
                raise ValueError(f"capture_time_hooks of {name}: unknown key {kind!r}; use one of {HOOK_KINDS}")
            if not isinstance(entries, Mapping) or not all(map(callable, entries.values())):
                raise TypeError(f"capture_time_hooks of {name}: {kind} must be a dict of hooks by id, got {entries!r}")
            self._hooks[kind] = list(entries.values())

    def run(self, kind: str, module: Callable, *arguments: Any) -> None:
        """Call the hooks of one kind in order; raise RuntimeError if a hook returns a value."""
        for hook in self._hooks[kind]:
            if hook(module, *arguments) is not None:
                culprit = getattr(hook, "__wrapped__", hook)
                raise RuntimeError(
                    f"capture_time_hooks of {self._name}: {kind} hook {culprit!r} returned a value. Hooks run outside "
                    "the graph and cannot change its inputs or outputs: return None."
                )
