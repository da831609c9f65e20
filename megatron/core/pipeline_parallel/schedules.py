"""Pipeline schedules that copy the overflow flag of ``token_bounds`` to the host before each backward pass."""

from typing import TYPE_CHECKING, Any

from megatron.core.token_bounds import token_bounds
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def backward_step(*args: Any, **kwargs: Any) -> Any:
    """Start copying the overflow flag, then run the backward pass of one micro-batch; see megatron-core."""
    token_bounds.copy_to_host()
    return _upstream.backward_step(*args, **kwargs)
