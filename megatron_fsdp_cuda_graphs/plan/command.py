"""The commands ``plan`` and ``explain``."""

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
    """Print what flags of a training would capture and keep in memory.

    Args:
        arguments: Those of the command, and flags as ``pretrain_gpt`` takes them.

    Returns:
        The exit code: 0 if the flags fit together, 1 if not, 2 if they cannot be read or a package is missing.
    """
    return _run("plan", "Show what flags would capture, without a GPU.", arguments)


def explain(arguments: Sequence[str]) -> int:
    """Print which parts of a model run in graphs and what to change for the others, like ``plan``."""
    return _run("explain", "Show which parts of a model flags would put in graphs.", arguments)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress what megatron-core prints, logs and warns of."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _run(name: str, description: str, arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m megatron_fsdp_cuda_graphs {name}",
        usage=f"python -m megatron_fsdp_cuda_graphs {name} [--world-size N] FLAGS OF pretrain_gpt",
        description=description,
        epilog="Exit code: 0 if the flags fit together, 1 if not, 2 if they cannot be read, or the model needs a "
        "package that is not installed here.",
        allow_abbrev=False,
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks (default: as few as can be)")
    if name == "plan":
        parser.add_argument("--every-graph", action="store_true", help="list all graphs, however many there are")
    try:
        own, given = parser.parse_known_args(arguments)
        if not given:
            parser.error("give the flags of a training, those that pretrain_gpt.py takes")
        if own.world_size is not None and own.world_size < 1:
            parser.error(f"--world-size must be a positive number of ranks, got {own.world_size}")
        _leave_gpus()
        with quietly():
            from .text import show

        return show(name, own, given)
    except SystemExit as end:
        return int(end.code or 0)


def _leave_gpus() -> None:
    """Run code for GPUs on the CPU in this process, with compute capability 9.0.

    Raises:
        SystemExit: 2, after saying what to do: the patch is off.
    """
    import torch  # noqa: F401, turns the patch on

    if not overlay.is_active():
        print(why_off(), file=sys.stderr)
        raise SystemExit(2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from ..cpu_backend import install

    install()
