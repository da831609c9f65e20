"""The hooks that run around one callable in warm-up and capture, outside the graph."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..hooks import HOOK_KINDS


class CaptureTimeHooks:
    """The hooks that run around one callable in warm-up and capture, outside the graph.

    Args:
        hooks: ``{kind: {id: hook}}`` with the kinds of ``HOOK_KINDS``; None for no hooks.

    Forward-pre hooks are offered ``(module, args, kwargs)``, forward hooks ``(module, args, output)``, the others
    ``(module)``. A hook is passed those that it requires, and further ones if it has parameters of these names; its
    other parameters keep their defaults.

    Raises:
        ValueError: the kind of a hook is unknown.
        TypeError: a hook is not callable, or hooks are not in a dict.
    """

    def __init__(self, name: str, hooks: Mapping[str, Mapping[Any, Callable]] | None):
        self._name = name
        self._hooks: dict[str, list[tuple[Callable, int]]] = {kind: [] for kind in HOOK_KINDS}
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
                self._hooks[kind].append((hook, _count_of_taken(hook, _OFFERED.get(kind, ()))))

    def run(self, kind: str, module: Callable, *offered: Any) -> None:
        """Call the hooks of one kind, in order.

        Raises:
            RuntimeError: a hook returned a value, which could not change anything in the graph.
        """
        for hook, count in self._hooks[kind]:
            if hook(module, *offered[:count]) is not None:
                culprit = getattr(hook, "__wrapped__", hook)
                raise RuntimeError(
                    f"capture_time_hooks of {self._name}: {kind} hook {culprit!r} returned a value. Hooks run outside "
                    "the graph and cannot change what it reads or returns; they must return None."
                )


# The arguments that hooks are offered after the module.
_OFFERED = {"forward_pre_hooks": ("args", "kwargs"), "forward_hooks": ("args", "output")}


def _count_of_taken(hook: Callable, offered: Sequence[str]) -> int:
    """Return how many of the ``offered`` arguments, from the first on, ``hook`` takes after the module."""
    try:
        parameters = list(inspect.signature(hook, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):  # of some built-in functions
        return 0
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = 0
    for name, parameter in zip(offered, positional[1:]):  # noqa: B905
        if parameter.default is not parameter.empty and parameter.name != name:
            return taken
        taken += 1
    return len(offered) if any(p.kind is p.VAR_POSITIONAL for p in parameters) else taken
