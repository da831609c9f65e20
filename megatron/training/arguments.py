"""Megatron's arguments, with the checks that CUDA graphs of a sharded model need."""

import argparse
from typing import TYPE_CHECKING, Any

from megatron.core.transformer._cuda_graphs.flags.options import Options, add_arguments
from megatron.core.transformer._cuda_graphs.flags.table import MODULES, check, warn
from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # names that are megatron-core's own

    def __getattr__(name: str) -> Any: ...


def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add megatron-core's arguments to ``parser``, and this project's own of CUDA graphs; return it."""
    parser = _upstream.add_megatron_arguments(parser)
    return add_arguments(parser)


def validate_args(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> argparse.Namespace:
    """Validate ``args`` as megatron-core does, then check that they fit CUDA graphs and grouped experts.

    Raises:
        ValueError: flags do not fit; names each, with the reason and the remedy.
    """
    args = _upstream.validate_args(args, defaults or {})
    options = Options(args)
    check(options)
    warn(options)
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
