"""Add this project's arguments to Megatron's, and check for flags that CUDA graphs do not support."""

import argparse
from typing import TYPE_CHECKING, Any

from megatron.core.transformer._cuda_graphs.flags.options import Options, add_arguments
from megatron.core.transformer._cuda_graphs.flags.table import MODULES, check, warn
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add Megatron's arguments and this project's own to ``parser``, and return it."""
    return add_arguments(_upstream.add_megatron_arguments(parser))


def validate_args(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> argparse.Namespace:
    """Validate ``args`` as megatron-core does, then check the flags for CUDA graphs and grouped experts.

    Raises:
        ValueError: Flags are not supported together; the message lists each one with a reason and a remedy.
    """
    args = _upstream.validate_args(args, defaults or {})
    options = Options(args)
    check(options)
    warn(options)
    if args.use_megatron_fsdp and args.pipeline_model_parallel_size > 1:
        args.align_grad_reduce = False  # otherwise only the first stage marks the last micro-batch
    return args


def _parse_cuda_graph_modules_arg(scope: str) -> Any:
    """Parse ``scope``, a value of ``--cuda-graph-modules``; see megatron-core.

    Raises:
        argparse.ArgumentTypeError: ``scope`` names no module. argparse adds the name of the flag to the message.
    """
    try:
        return _upstream._parse_cuda_graph_modules_arg(scope)
    except KeyError:
        raise argparse.ArgumentTypeError(f"unknown module {scope!r}: use {', '.join(MODULES)}") from None
