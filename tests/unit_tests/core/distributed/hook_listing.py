"""List a module's hooks by name, translating megatron-core's hooks to the names of our methods."""

import inspect
from collections.abc import Callable
from functools import partial

import torch

HOOK_DICTS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
FLAG_DICTS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")

# Maps each local function of megatron-core to the method that replaces it.
METHODS = {
    "_pre_forward_param_unshard": "unshard_for_forward",
    "_post_forward": "release_after_forward",
    "_release_module_fp8_transpose_cache": "release_transpose_cache",
    "_register_post_backward_hook _post_backward_release_module": "attach_after_backward release_after_backward",
    "forward_hook _pre_backward_param_unshard": "attach_before_backward unshard_for_backward",
    "forward_hook _root_pre_backward": "attach_before_backward start_backward",
}


def describe(hook: Callable) -> str:
    """Return the name of a hook, followed by the name of the handler that it attaches, if any."""
    if isinstance(hook, partial):
        return " ".join(inspect.unwrap(part).__name__ for part in (hook.func, *hook.args))
    function = inspect.unwrap(hook)
    handler = inspect.getclosurevars(function).nonlocals.get("custom_backward_handler")
    return " ".join(part.__name__ for part in (function, handler) if part is not None)


def hooks_of(fsdp: torch.nn.Module) -> dict[str, list]:
    """Map each module's name to its hooks in order, each as a tuple of hook dict, hook name and flags."""
    return {
        name: [
            (kind, describe(hook), [flag for flag in FLAG_DICTS if flag.startswith(kind) and key in vars(module)[flag]])
            for kind in HOOK_DICTS
            for key, hook in vars(module)[kind].items()
        ]
        for name, module in fsdp.named_modules()
    }


def translated(listed: dict[str, list]) -> dict[str, list]:
    """Translate the hooks of megatron-core's own wrapper, from ``hooks_of``, to our names."""
    return {
        name: [(kind, METHODS.get(hook, hook), flags) for kind, hook, flags in hooks] for name, hooks in listed.items()
    }
