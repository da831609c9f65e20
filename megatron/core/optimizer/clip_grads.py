"""Gradient clipping that takes the local shards of gradients at less cost to the host.

Everything else in this module is megatron-core's.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def to_local_if_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a ``DTensor``, without a record for autograd; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
