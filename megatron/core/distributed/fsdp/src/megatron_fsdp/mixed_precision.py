"""Megatron-FSDP's casts to FP8, of which shards get no transposes."""

from typing import TYPE_CHECKING, Any

import torch

from megatron.core.fp8_shards import without_transposes
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def fp8_quantize(model_params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    """Cast the shards of parameters to FP8; see megatron-core."""
    if model_params:
        with without_transposes():
            _upstream.fp8_quantize(model_params, *args, **kwargs)
