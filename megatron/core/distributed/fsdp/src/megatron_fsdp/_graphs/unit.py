"""The parts of an FSDP unit, collected once: hooks need them several times in every pass."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..mixed_precision import is_float8tensor

Direction = Literal["forward", "backward"]

# What an error about a moved buffer says at the end.
ADVICE = (
    "Graphs need --fsdp-double-buffer and --fsdp-db-use-persist-buf-on-alloc-fail, which keep buffers in place; if "
    "both are set, the order of all-gathers changed since capture (a unit that ran out of turn, say)."
)


@dataclass(frozen=True)
class Unit:
    """An FSDP unit: a module whose parameters are gathered and released together.

    Attributes:
        params: Its parameters, raw.
        buckets: The indices of the buckets that hold them.
        float8_params: Those of ``params`` that are FP8 tensors.
        submodules: The module and all modules below it.
    """

    params: list[torch.nn.Parameter]
    buckets: list[int]
    float8_params: list[torch.nn.Parameter]
    submodules: list[torch.nn.Module]

    @classmethod
    def of(cls, module: torch.nn.Module, bucket_of: dict[torch.nn.Parameter, int]) -> "Unit":
        """Collect the parts of ``module``, whose parameters must be raw."""
        params = list(module.parameters())
        return cls(
            params=params,
            buckets=sorted({bucket_of[param] for param in params}),
            float8_params=[param for param in params if is_float8tensor(param)],
            submodules=list(module.modules()),
        )

    def set_training_state(self, state: Any) -> None:
        """Set the training state of every module of the unit."""
        for submodule in self.submodules:
            submodule.__dict__["_training_state"] = state  # bypasses Module.__setattr__, which is slow
