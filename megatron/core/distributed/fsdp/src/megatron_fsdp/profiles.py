"""Names of Megatron-FSDP's work in profiles."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def shown_in_profiles[**P, R](phase: Callable[P, R]) -> Callable[P, R]:
    """Show the method ``phase`` in profiles by its name, and by that of its module in the owner's ``module_names``."""

    @wraps(phase)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.autograd._profiler_enabled():
            return phase(*args, **kwargs)
        owner: Any = args[0]
        name = owner.module_names.get(args[1], "") if len(args) > 1 else ""
        with torch.profiler.record_function(f"FSDP::{phase.__name__} ({name})"):
            return phase(*args, **kwargs)

    return run
