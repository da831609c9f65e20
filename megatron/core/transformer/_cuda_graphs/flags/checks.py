"""The options that CUDA graphs of a sharded model need; one check for flags and for configurations."""

import logging
from typing import Any

import torch

from megatron.core.utils import log_single_rank

from ..hooks import must_run_outside
from .options import Options
from .table import MEGATRON_FSDP, TABLE, TORCH_FSDP, Row, Verdict

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

_NO_LOCAL_GRAPHS = next(row.words for row in TABLE if row.graphs == ("local",))


def check_flags(flags: Any) -> None:
    """Check parsed flags, before or after megatron-core's validation.

    Args:
        flags: Any object with attributes as of Megatron's parsed flags.

    Raises:
        ValueError: the model is to be sharded and flags do not fit its CUDA graphs; all are listed.
    """
    sharding = _sharding(Options(flags))
    if sharding is not None:
        check_fsdp_options(flags, sharding=sharding)


def warn_of_flags(flags: Any) -> None:
    """Log a line for each flag that has no effect, or was not tried, with CUDA graphs of a sharded model."""
    for row in rows_of_flags(flags):
        if row.verdict in (Verdict.NO_EFFECT, Verdict.NOT_TRIED):
            log_single_rank(logger, logging.WARNING, row.words)


def rows_of_flags(flags: Any) -> list[Row]:
    """Return the rows of the table that parsed ``flags`` are in; none if they shard no model."""
    options = Options(flags)
    sharding = _sharding(options)
    return [] if sharding is None else _rows(options, sharding)


def check_fsdp_options(*sources: Any, sharding: str = MEGATRON_FSDP) -> None:
    """Check the options of a sharded model for CUDA graphs.

    Args:
        sources: Where the options are; see ``Options``.

    Raises:
        ValueError: a flag is missing or does not fit; all such flags are listed, with the reasons.
    """
    options = Options(*sources)
    problems = [row.words for row in _rows(options, sharding) if row.verdict is Verdict.REFUSED]
    if problems:
        raise ValueError(
            f"{sharding} with --cuda-graph-impl {options.implementation}:\n" + "\n".join(f"- {p}" for p in problems)
        )


def _rows(options: Options, sharding: str) -> list[Row]:
    return [row for row in TABLE if row.applies(options, sharding)]


def _sharding(options: Options) -> str | None:
    """The flag that shards the model; None if there is none."""
    if options.get("use_megatron_fsdp"):
        return MEGATRON_FSDP
    return TORCH_FSDP if options.get("use_torch_fsdp2") else None


def refuse_fsdp_hooks(module: torch.nn.Module) -> None:
    """Refuse a module for local graphs if Megatron-FSDP has registered hooks on it or its submodules.

    Raises:
        ValueError: Megatron-FSDP has such a hook.
    """
    for part in module.modules():
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            if must_run_outside(hook):
                raise ValueError(f"--use-megatron-fsdp with --cuda-graph-impl local: {_NO_LOCAL_GRAPHS}")
