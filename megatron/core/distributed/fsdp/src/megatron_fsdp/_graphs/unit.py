"""FSDP units, the states of their modules, and the names of phases in profiles."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import wraps
from typing import Any, Literal

import torch

from ..mixed_precision import is_float8tensor

Direction = Literal["forward", "backward"]

# The end of errors about moved buffers.
ADVICE = (
    "graphs need --fsdp-double-buffer and --fsdp-db-use-persist-buf-on-alloc-fail, which keep buffers in place; if "
    "both are set, the order of all-gathers changed (a unit that ran out of turn, for example)"
)


class TrainingState(Enum):
    """The state of a module in a training step, in its ``_training_state``."""

    FORWARD = auto()
    PRE_BACKWARD = auto()  # its parameters are gathered for backward, or its forward pass is recomputed
    POST_BACKWARD = auto()
    IDLE = auto()


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered and released together.

    Attributes:
        params: Its parameters, raw.
        buckets: The indices of their buckets.
        float8_params: Those of ``params`` that are FP8 tensors.
        submodules: The module and all modules below it.
    """

    params: list[torch.nn.Parameter]
    buckets: list[int]
    float8_params: list[torch.nn.Parameter]
    submodules: list[torch.nn.Module]

    @classmethod
    def of(cls, module: torch.nn.Module, bucket_of: dict[torch.nn.Parameter, int]) -> "Unit":
        """Return the unit of ``module``, whose parameters must be raw."""
        params = list(module.parameters())
        return cls(
            params=params,
            buckets=sorted({bucket_of[param] for param in params}),
            float8_params=[param for param in params if is_float8tensor(param)],
            submodules=list(module.modules()),
        )

    def set_training_state(self, state: TrainingState) -> None:
        """Set the training state of every module of the unit."""
        for submodule in self.submodules:
            submodule.__dict__["_training_state"] = state  # bypasses Module.__setattr__, which is slow


def shown_in_profiles[**P, R](phase: Callable[P, R]) -> Callable[P, R]:
    """Show the method ``phase`` in profiles, with the name of the module that it is given, or that its owner has."""

    @wraps(phase)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.autograd._profiler_enabled():
            return phase(*args, **kwargs)
        owner: Any = args[0]
        module = args[1] if len(args) > 1 else getattr(owner, "module", None)
        name = owner.module_names.get(module, "")
        with torch.profiler.record_function(f"FSDP::{phase.__name__} ({name})"):
            return phase(*args, **kwargs)

    return run
