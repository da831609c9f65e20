"""Megatron's arguments, with the checks that CUDA graphs of a sharded model need."""

import argparse
from typing import TYPE_CHECKING, Any

from megatron.core.transformer._cuda_graphs.flags import own
from megatron.core.transformer._cuda_graphs.flags.checks import check_flags, check_grouped_tensor, warn_of_flags
from megatron.core.transformer._cuda_graphs.flags.table import MODULES
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # names that are megatron-core's own

    def __getattr__(name: str) -> Any: ...


def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add megatron-core's arguments to ``parser``, and this project's own of CUDA graphs; return it."""
    parser = _upstream.add_megatron_arguments(parser)
    return own.add_arguments(parser)


def validate_args(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> argparse.Namespace:
    """Validate ``args`` as megatron-core does, and what CUDA graphs of a sharded model need.

    Flags are checked first, as megatron-core's own refusals name neither flag nor remedy, and again with the defaults
    and what flags imply.

    Raises:
        ValueError: flags do not fit; names each, and says why and what to do.
    """
    check_grouped_tensor(args)
    check_flags(args)
    args = _upstream.validate_args(args, defaults or {})
    own.check_arguments(args)
    check_flags(args)
    warn_of_flags(args)
    if args.use_megatron_fsdp and args.pipeline_model_parallel_size > 1:
        args.align_grad_reduce = False  # else only the first stage learns which micro-batch is the last one
    return args


def _parse_cuda_graph_modules_arg(scope: str) -> Any:
    """Return the value of ``--cuda-graph-modules`` that ``scope`` names; see megatron-core.

    Raises:
        argparse.ArgumentTypeError: it names none.
    """
    try:
        return _upstream._parse_cuda_graph_modules_arg(scope)
    except KeyError:
        raise argparse.ArgumentTypeError(f"{scope!r} is none of {', '.join(MODULES)}") from None
