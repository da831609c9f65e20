"""Remove a layer's hooks for CUDA graph capture, pass them to the engine, and restore them.

The engine calls the layer without hooks, and runs *capture-time hooks* before and after that call, outside the graph.
The layer's hooks become capture-time hooks in two phases:

1. ``ModuleHooks.extract`` copies the layer's hook dicts and clears them. Hooks on the layer's submodules stay and are
   recorded in the graph, except wrappers (see below) and hooks marked by ``runs_outside_graphs``.
2. ``ModuleHooks.capture_time_hooks`` sorts the copies into the engine's four kinds. Two kinds of hooks only *wrap* a
   handler that autograd calls later. They have a sentinel attribute, and the engine receives the handler instead of the
   wrapper:

   - ``_cuda_graph_backward_handler`` on a forward-pre hook: the handler runs after backward;
   - ``_cuda_graph_backward_pre_handler`` on a forward hook: the handler runs before backward.

   Apart from handlers, the engine receives only marked hooks. Third-party hooks do not run at capture; they run around
   each replay, as often and with the same values as in eager training.

``restore`` restores the copies of phase 1, which phase 2 does not modify.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch

from .errors import UnsupportedError

HOOK_KINDS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
BACKWARD_HANDLER = "_cuda_graph_backward_handler"
BACKWARD_PRE_HANDLER = "_cuda_graph_backward_pre_handler"
_RUNS_OUTSIDE = "_cuda_graph_runs_outside"

# The dicts in which torch.nn.Module stores hooks and their flags, by hook ID.
_HOOK_DICTS = tuple(f"_{kind}" for kind in HOOK_KINDS)
_FLAG_DICTS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")

HookDicts = dict[str, dict[int, Callable[..., None]]]


def runs_outside_graphs(hook: Callable) -> Callable:
    """Mark ``hook`` so that it never runs while a graph is recorded, on any module."""
    setattr(hook, _RUNS_OUTSIDE, True)
    return hook


def calls_weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """Return a hook that calls ``method`` through a weak reference, so the hook can be copied without the object."""
    weak = weakref.WeakMethod(method)

    def hook(*call: Any) -> None:
        alive = weak()
        if alive is not None:
            alive(*call)

    return hook


def must_run_outside(hook: Callable) -> bool:
    """Return whether ``hook`` is marked by ``runs_outside_graphs`` or wraps a handler, as Megatron-FSDP's hooks do."""
    return any(_mark_of(hook, mark) is not None for mark in (BACKWARD_HANDLER, BACKWARD_PRE_HANDLER, _RUNS_OUTSIDE))


def _mark_of(hook: Any, mark: str) -> Any:
    """Return the attribute ``mark`` of ``hook``, or of the function wrapped by a partial ``hook``; None if absent."""
    while not hasattr(hook, mark) and isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, mark, None)


def is_of_ddp(hook: Callable) -> bool:
    """Return whether ``hook`` belongs to ``DistributedDataParallel``."""
    return getattr(hook, "__module__", None) == "megatron.core.distributed.distributed_data_parallel"


def has_own_hooks(module: torch.nn.Module) -> bool:
    """Return whether ``module`` has hooks other than sharding hooks."""
    return any(
        not (must_run_outside(hook) or is_of_ddp(hook))
        for name in _HOOK_DICTS
        for hook in getattr(module, name).values()
    )


def has_other_hooks(module: torch.nn.Module) -> bool:
    """Return whether ``module`` has hooks other than sharding hooks, or global module hooks exist."""
    return has_own_hooks(module) or torch.nn.modules.module._has_any_global_hook()


@dataclass(frozen=True)
class ModuleHooks:
    """The hooks of one module before capture.

    Attributes:
        saved: Copies of the module's dicts of hooks and of hook flags (``with_kwargs``, for example), keyed by name.
    """

    module: torch.nn.Module
    saved: dict[str, dict[int, Any]]

    @classmethod
    def extract(cls, module: torch.nn.Module, outside_only: bool = False) -> "ModuleHooks":
        """Phase 1: copy the hooks of ``module``, then remove them.

        Args:
            outside_only: Remove only hooks that must run outside graphs.

        Raises:
            UnsupportedError: ``module`` has a hook registered by the deprecated ``register_backward_hook``.
        """
        if not outside_only and module._backward_hooks and not module._is_full_backward_hook:
            raise UnsupportedError(
                f"{type(module).__name__} has a hook registered by register_backward_hook, but replays would pass it "
                "different gradients: use register_full_backward_hook"
            )
        saved = {name: dict(getattr(module, name)) for name in (*_HOOK_DICTS, *_FLAG_DICTS)}
        hooks = [item for name in _HOOK_DICTS for item in saved[name].items()]
        for key in [key for key, hook in hooks if not outside_only or must_run_outside(hook)]:
            for name in saved:
                getattr(module, name).pop(key, None)
        return cls(module, saved)

    def restore(self) -> None:
        """Restore all hooks in order, with their flags. Hooks registered since ``extract`` follow them.

        The dicts are refilled, not replaced, because torch's ``RemovableHandle`` refers to the dict object.
        """
        for name, entries in self.saved.items():
            current = getattr(self.module, name)
            added = {key: value for key, value in current.items() if key not in entries}
            current.clear()
            current.update(entries)
            current.update(added)

    def capture_time_hooks(self) -> HookDicts:
        """Phase 2: return the engine's ``{kind: {id: hook}}``.

        Each hook calls the original with torch's arguments, and returns its result for the engine to check.
        """
        sorted_hooks: HookDicts = {kind: {} for kind in HOOK_KINDS}
        for kind, sentinel, kind_of_handler in (
            ("forward_pre_hooks", BACKWARD_HANDLER, "backward_hooks"),
            ("forward_hooks", BACKWARD_PRE_HANDLER, "backward_pre_hooks"),
        ):
            for key, hook in self.saved[f"_{kind}"].items():
                handler = _mark_of(hook, sentinel)
                if handler is not None:
                    sorted_hooks[kind_of_handler][key] = handler
                elif must_run_outside(hook):
                    with_kwargs = key in self.saved[f"_{kind}_with_kwargs"]
                    sorted_hooks[kind][key] = _adapted(hook, kind, with_kwargs)
        return sorted_hooks


def _adapted(hook, kind, with_kwargs):
    """Adapt ``hook`` to the engine's signature: ``(module, args, kwargs)`` or ``(module, args, output)``."""

    @wraps(hook, assigned=(), updated=())
    def call(module, args, last):
        if kind == "forward_hooks":
            return hook(module, args, {}, last) if with_kwargs else hook(module, args, last)
        return hook(module, args, last) if with_kwargs else hook(module, args)

    return call


@contextmanager
def extracted_hooks(callables: Iterable[torch.nn.Module]) -> Iterator[list[HookDicts]]:
    """Context manager that removes the hooks of ``callables``; yields one dict of capture-time hooks for each."""
    taken: list[ModuleHooks] = []
    try:
        capture_time_hooks = []
        for module in callables:
            taken.append(ModuleHooks.extract(module))
            capture_time_hooks.append(taken[-1].capture_time_hooks())
            children = (child for child in module.modules() if child is not module)
            taken.extend(ModuleHooks.extract(child, outside_only=True) for child in children)
        yield capture_time_hooks
    finally:
        for hooks in reversed(taken):
            hooks.restore()
