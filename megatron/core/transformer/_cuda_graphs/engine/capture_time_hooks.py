"""Hooks that run around a callable in warm-up and capture, outside the graph."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..hooks import HOOK_KINDS


class CaptureTimeHooks:
    """Runs hooks around one callable in warm-up and capture, outside the graph.

    Forward-pre hooks accept ``(module, args, kwargs)``, forward hooks ``(module, args, output)``, and backward hooks
    ``(module)``. Arguments are passed by position. Hooks may have fewer parameters; a parameter with a default receives
    an argument only if both have the same name.

    Args:
        hooks: ``{kind: {id: hook}}``, with kinds from ``HOOK_KINDS``; None for no hooks.

    Raises:
        ValueError: A kind is unknown.
        TypeError: A hook is not callable, or hooks are not in a dict.
    """

    def __init__(self, name: str, hooks: Mapping[str, Mapping[Any, Callable]] | None):
        self._name = name
        self._hooks: dict[str, list[tuple[Callable, int]]] = {kind: [] for kind in HOOK_KINDS}
        if not isinstance(hooks, Mapping | None):
            raise TypeError(
                f"capture_time_hooks of {name} must be a dict with the keys {HOOK_KINDS} or None, got {hooks!r}"
            )
        for kind, entries in (hooks or {}).items():
            if kind not in HOOK_KINDS:
                raise ValueError(f"capture_time_hooks of {name}: unknown key {kind!r}; use one of {HOOK_KINDS}")
            if not isinstance(entries, Mapping) or not all(map(callable, entries.values())):
                raise TypeError(f"capture_time_hooks of {name}: {kind} must be a dict of hooks by id, got {entries!r}")
            own = [(hook, _argument_count(hook, _ARGUMENTS.get(kind, ()))) for hook in entries.values()]
            self._hooks[kind] = own

    def run(self, kind: str, module: Callable, *arguments: Any) -> None:
        """Call the hooks of one kind in order; raise RuntimeError if a hook returns a value."""
        for hook, count in self._hooks[kind]:
            if hook(module, *arguments[:count]) is not None:
                culprit = getattr(hook, "__wrapped__", hook)
                raise RuntimeError(
                    f"capture_time_hooks of {self._name}: {kind} hook {culprit!r} returned a value. Hooks run outside "
                    "the graph and cannot change its inputs or outputs: return None."
                )


# Hook arguments after the module.
_ARGUMENTS = {"forward_pre_hooks": ("args", "kwargs"), "forward_hooks": ("args", "output")}


def _argument_count(hook: Callable, names: Sequence[str]) -> int:
    """Return how many of ``names`` the signature of ``hook`` accepts after the module."""
    try:
        parameters = list(inspect.signature(hook, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature
        return 0
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = 0
    for name, parameter in zip(names, positional[1:]):  # noqa: B905, a hook may take fewer or more
        if parameter.default is not parameter.empty and parameter.name != name:
            return count
        count += 1
    return len(names) if any(p.kind is p.VAR_POSITIONAL for p in parameters) else count
