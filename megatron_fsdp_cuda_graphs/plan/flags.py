"""Parse and check training flags without starting a training run."""

import argparse
import io
import math
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from megatron.core.transformer._cuda_graphs.flags.options import Options
from megatron.core.transformer._cuda_graphs.flags.table import Verdict, rows_of
from megatron.training import arguments as megatron_arguments

from ..overlay import upstream
from .command import quietly


@dataclass
class Flags:
    """Checked training flags.

    Attributes:
        args: Megatron's parsed arguments; validated unless ``refused`` has an entry.
        refused: A message for each reason not to start the job.
        remarks: A message for each flag that has no effect or is untested with graphs.
    """

    args: argparse.Namespace
    refused: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def read_flags(arguments: Sequence[str], world_size: int | None) -> Flags:
    """Parse flags and check them as ``validate_args`` does, but collect all errors.

    Args:
        arguments: Flags of ``pretrain_gpt``.
        world_size: Number of ranks; None for the minimum.

    Raises:
        SystemExit: With code 2, after argparse's message, if a flag is unknown or its value has the wrong type.
    """
    args = _parse(arguments)
    minimum = _minimum_world_size(args)
    args.world_size = world_size or minimum
    flags = Flags(args)
    if args.world_size % minimum:
        flags.refused.append(
            f"--world-size {args.world_size}: the parallel sizes and --num-distributed-optimizer-instances need a "
            f"multiple of {minimum} ranks"
        )
    try:
        with quietly():
            upstream("megatron.training.arguments").validate_args(args, {})
    except (Exception, SystemExit) as error:
        flags.refused.append(f"megatron-core: {message_of(error)}")
    options = Options(args)
    flags.refused += options.problems()
    for row in rows_of(options):
        (flags.refused if row.verdict is Verdict.REFUSED else flags.remarks).append(row.words)
    return flags


def message_of(error: BaseException) -> str:
    """Return the message of ``error``, or the failing line of a bare assertion."""
    return str(error) or f"{type(error).__name__}: {traceback.extract_tb(error.__traceback__)[-1].line}"


def _minimum_world_size(args: argparse.Namespace) -> int:
    """Return the smallest number of ranks that the parallel sizes allow."""
    dense = args.tensor_model_parallel_size * args.context_parallel_size
    experts = (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) * args.expert_model_parallel_size
    of_stage = math.lcm(dense, experts if args.num_experts else 1) * args.num_distributed_optimizer_instances
    return of_stage * args.pipeline_model_parallel_size


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    output = io.StringIO()
    try:
        with redirect_stderr(output), mock.patch.object(sys, "argv", ["pretrain_gpt", *arguments]):
            args: Any = megatron_arguments.parse_args()
    except SystemExit:
        _, error, message = output.getvalue().partition("pretrain_gpt: error: ")  # omits the usage of all flags
        print(error + message, end="", file=sys.stderr)
        raise
    return args
