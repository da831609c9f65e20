"""Removes a layer's hooks for CUDA-graph capture, passes them to the engine, and restores them.

A capture engine calls the layer without hooks, and runs *capture-time hooks* around that call, outside the graph. The
layer's hooks become capture-time hooks in two phases:

1. ``ModuleHooks.extract`` copies the layer's hook dicts and clears them. Hooks on the layer's submodules are recorded
   in the graph and stay, except wrappers (see below) and those marked by ``runs_outside_graphs``.
2. ``ModuleHooks.capture_time_hooks`` sorts the copies under the engine's four keys. Two kinds of hook only *wrap* a
   handler that autograd calls later. They carry a sentinel, and the engine gets the handler instead of the wrapper:

   - ``_cuda_graph_backward_handler`` on a forward-pre hook: the handler runs after backward;
   - ``_cuda_graph_backward_pre_handler`` on a forward hook: the handler runs before backward.

   Of the other hooks the engine gets those marked by ``runs_outside_graphs``. Third-party hooks and those of torch's
   FSDP2 do not run at capture: training runs them around each replay, as often and with the same values as eagerly.

``restore`` puts back the copies of phase 1, which phase 2 does not modify.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
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

# The dicts in which torch.nn.Module keeps hooks and their flags, by the hook's id.
_HOOK_DICTS = tuple(f"_{kind}" for kind in HOOK_KINDS)
_FLAG_DICTS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")

HookDicts = dict[str, dict[int, Callable[..., None]]]


def runs_outside_graphs(hook: Callable) -> Callable:
    """Mark ``hook`` as one that must never run while a graph records, whichever module it is registered on."""
    setattr(hook, _RUNS_OUTSIDE, True)
    return hook


def calls_weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """Return a hook that calls ``method`` as long as its object lives: a copied module has the hook, not the object."""
    weak = weakref.WeakMethod(method)

    def hook(*call: Any) -> None:
        alive = weak()
        if alive is not None:
            alive(*call)

    return hook


def must_run_outside(hook: Callable) -> bool:
    """Whether ``hook`` is marked by ``runs_outside_graphs`` or wraps a handler (see above), as Megatron-FSDP's are."""
    while not any(hasattr(hook, mark) for mark in (BACKWARD_HANDLER, BACKWARD_PRE_HANDLER, _RUNS_OUTSIDE)):
        if not isinstance(hook, partial):
            return False
        hook = hook.func
    return True


def is_of_ddp(hook: Callable) -> bool:
    """Whether ``hook`` waits for parameters for ``DistributedDataParallel``, which comes and goes with evaluations."""
    return getattr(hook, "__module__", None) == "megatron.core.distributed.distributed_data_parallel"


def hooks_on(module: torch.nn.Module) -> Iterator[Callable]:
    """Yield the hooks of all kinds on ``module`` itself."""
    for name in _HOOK_DICTS:
        yield from getattr(module, name).values()


def has_other_hooks(module: torch.nn.Module) -> bool:
    """Whether ``module`` has hooks beside those that shard it, or torch has hooks for all modules."""
    own = any(not (must_run_outside(hook) or _is_of_torch_fsdp(hook)) for hook in hooks_on(module))
    return own or torch.nn.modules.module._has_any_global_hook()


def recorded_hooks(root: torch.nn.Module, modules: Mapping[torch.nn.Module, str]) -> list[str]:
    """Return the names of the ``modules`` in ``root`` whose third-party hooks are recorded with it."""
    if torch.nn.modules.module._has_any_global_hook():  # all modules would have hooks
        return []
    return [name for module, name in modules.items() if module is not root and has_other_hooks(module)]


@dataclass(frozen=True)
class ModuleHooks:
    """The hooks of one module before capture.

    Attributes:
        saved: For each of torch's hook and flag dicts, a copy of its entries, in their order.
    """

    module: torch.nn.Module
    saved: dict[str, dict[int, Any]]

    @classmethod
    def of(cls, module: torch.nn.Module) -> "ModuleHooks":
        """Copy the hooks of ``module``."""
        return cls(module, {name: dict(getattr(module, name)) for name in (*_HOOK_DICTS, *_FLAG_DICTS)})

    @classmethod
    def extract(cls, module: torch.nn.Module) -> "ModuleHooks":
        """Phase 1: copy the hooks of ``module``, then clear them.

        Raises:
            UnsupportedError: ``module`` has a hook that was registered by the deprecated ``register_backward_hook``.
        """
        if module._backward_hooks and not module._is_full_backward_hook:
            raise UnsupportedError(
                f"{type(module).__name__} has a non-full backward hook (register_backward_hook), which replays cannot "
                "call with eager gradients: use register_full_backward_hook"
            )
        hooks = cls.of(module)
        for name in hooks.saved:
            getattr(module, name).clear()
        return hooks

    @classmethod
    def withhold(cls, module: torch.nn.Module) -> "ModuleHooks":
        """Copy the hooks of ``module``, then remove only those that must run outside graphs."""
        hooks = cls.of(module)
        outside = [key for name in _HOOK_DICTS for key, hook in hooks.saved[name].items() if must_run_outside(hook)]
        for name in hooks.saved:
            for key in outside:
                getattr(module, name).pop(key, None)
        return hooks

    def restore(self) -> None:
        """Restore every hook, in its order and with its flags.

        The dicts are refilled rather than replaced: torch's ``RemovableHandle`` refers to the dict object. A hook that
        was registered in the meantime stays, behind the restored ones.
        """
        for name, entries in self.saved.items():
            current = getattr(self.module, name)
            added = {key: value for key, value in current.items() if key not in entries}
            current.clear()
            current.update(entries)
            current.update(added)

    def capture_time_hooks(self) -> HookDicts:
        """Phase 2: return the engine's ``{kind: {id: hook}}``.

        Each hook takes the module and, where the engine offers them, the arguments that torch would give a hook of its
        kind. It returns what the original returned, so that the engine can refuse a hook that changes a value.
        """
        sorted_hooks: HookDicts = {kind: {} for kind in HOOK_KINDS}
        for kind, marked, kind_of_marked, given in (
            ("forward_pre_hooks", BACKWARD_HANDLER, "backward_hooks", _given_before),
            ("forward_hooks", BACKWARD_PRE_HANDLER, "backward_pre_hooks", _given_after),
        ):
            for key, hook in self.saved[f"_{kind}"].items():
                handler = getattr(hook, marked, None)
                if handler is not None:
                    sorted_hooks[kind_of_marked][key] = _calling(handler, lambda *offered: ())
                elif must_run_outside(hook):
                    with_kwargs = key in self.saved[f"_{kind}_with_kwargs"]
                    sorted_hooks[kind][key] = _calling(hook, partial(given, with_kwargs))
        return sorted_hooks


def _is_of_torch_fsdp(hook):
    """Whether ``hook`` is one of torch's FSDP2, which gathers and frees parameters and returns other arguments."""
    return hasattr(getattr(hook, "__self__", None), "_fsdp_param_group")


# The functions that the engine calls. Its error messages use ``__wrapped__``.


def _calling(hook, given):
    """Call ``hook`` with the module and what ``given`` returns of what the engine offers."""

    @wraps(hook, assigned=(), updated=())
    def call(module, *offered):
        return hook(module, *given(*offered))

    return call


def _given_before(with_kwargs, args=(), kwargs=None):
    return (args, kwargs or {}) if with_kwargs else (args,)


def _given_after(with_kwargs, args=(), output=None):
    return (args, {}, output) if with_kwargs else (args, output)


@contextmanager
def extracted_hooks(callables: Iterable[torch.nn.Module]) -> Iterator[list[HookDicts]]:
    """Remove the hooks of ``callables`` while the context lasts.

    Yields:
        One dict of capture-time hooks for each callable, in order.

    The hooks are restored when the context ends, also after an exception.
    """
    taken: list[ModuleHooks] = []
    try:
        capture_time_hooks = []
        for module in callables:
            taken.append(ModuleHooks.extract(module))
            capture_time_hooks.append(taken[-1].capture_time_hooks())
            taken.extend(ModuleHooks.withhold(child) for child in module.modules() if child is not module)
        yield capture_time_hooks
    finally:
        for hooks in reversed(taken):
            hooks.restore()
