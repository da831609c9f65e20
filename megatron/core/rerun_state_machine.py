"""Reruns of steps, agreed on by all ranks without each waiting for its device to finish the step.

Everything else in this module is megatron-core's.
"""

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


class RerunStateMachine(_upstream.RerunStateMachine):
    """megatron-core's ``RerunStateMachine`` whose ranks agree on a stream of their own.

    What they agree on is known to the hosts. On the current stream it would be reduced after all work of the step, and
    the optimizer's be given to a device that has run idle by then.
    """

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def _reduce_any(self, value: bool | list[bool]) -> bool | tuple[bool, ...]:
        with torch.cuda.stream(self._stream):
            result: bool | tuple[bool, ...] = super()._reduce_any(value)
        return result
