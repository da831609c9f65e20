"""Build the model configuration from Megatron's arguments, including this project's CUDA graph options."""

import argparse
from typing import TYPE_CHECKING, Any

from megatron.core.transformer._cuda_graphs.flags.options import give_to_config
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def core_transformer_config_from_args(args: argparse.Namespace, config_class: type | None = None) -> Any:
    """Return megatron-core's model configuration extended with the options of ``TECudaGraphHelper``."""
    config = _upstream.core_transformer_config_from_args(args, config_class)
    give_to_config(args, config)
    return config
