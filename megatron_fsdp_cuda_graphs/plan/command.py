"""Run the command ``plan``."""

import argparse
import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence

from .. import overlay
from ..doctor import why_off


def plan(arguments: Sequence[str]) -> int:
    """Print the graphs that a training command would capture, and its memory.

    Args:
        arguments: Arguments of this command, and flags of ``pretrain_gpt``.

    Returns:
        Exit code: 0 if the flags are compatible, 1 if not, 2 if they cannot be parsed or the patch is off.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron_fsdp_cuda_graphs plan",
        usage="python -m megatron_fsdp_cuda_graphs plan [--world-size N] [--every-graph] FLAGS OF pretrain_gpt",
        description="Show what flags would capture, without a GPU.",
        epilog="Exit code: 0 if the flags work together, 1 if not, 2 if they cannot be parsed or the patch is off.",
        allow_abbrev=False,
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks (default: the minimum)")
    parser.add_argument("--every-graph", action="store_true", help="list all graphs")
    try:
        own, given = parser.parse_known_args(arguments)
        if not given:
            parser.error("add the training flags that you pass to pretrain_gpt.py")
        if own.world_size is not None and own.world_size < 1:
            parser.error(f"--world-size must be a positive number of ranks, got {own.world_size}")
        _use_cpu()
        with quietly():
            from .text import show

        return show(own, given)
    except SystemExit as end:
        return int(end.code or 0)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress megatron-core's output, log messages and warnings within the context."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _use_cpu() -> None:
    """Install the CPU backend in this process.

    Raises:
        SystemExit: With code 2, after printing the remedy, if the patch is off.
    """
    import torch  # noqa: F401, turns the patch on

    if not overlay.is_active():
        print(why_off(), file=sys.stderr)
        raise SystemExit(2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from ..cpu_backend import install

    install()
