"""Megatron's arguments, with the checks that per-layer CUDA graphs under Megatron-FSDP need.

Everything else of megatron-core's module of this path is megatron-core's own.
"""

import argparse
from typing import TYPE_CHECKING, Any

from megatron.core.transformer._cuda_graphs.fallback import add_fallback_argument, check_fallback
from megatron.core.transformer._cuda_graphs.fsdp_checks import check_fsdp_options
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # names that are megatron-core's own

    def __getattr__(name: str) -> Any: ...


def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add megatron-core's arguments to ``parser``, and ``--cuda-graph-fallback``; return it."""
    return add_fallback_argument(_upstream.add_megatron_arguments(parser))


def validate_args(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> argparse.Namespace:
    """Validate ``args`` as megatron-core does, and the options of CUDA graphs under Megatron-FSDP.

    Raises:
        ValueError: names each flag that CUDA graphs under Megatron-FSDP miss, and says why.
    """
    args = _upstream.validate_args(args, defaults or {})
    check_fallback(args)
    if args.use_megatron_fsdp:
        check_fsdp_options(args.cuda_graph_impl, args, gradient_accumulation_fusion=args.gradient_accumulation_fusion)
    return args
