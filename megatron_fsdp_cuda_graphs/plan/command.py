"""The commands ``plan`` and ``explain``: their arguments, the process in which they run, their ends."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from .. import overlay
from ..doctor import why_off
from .quiet import quietly


def plan(arguments: Sequence[str]) -> int:
    """Print what flags of a training would capture and keep in memory.

    Args:
        arguments: Those of the command, and flags as ``pretrain_gpt`` takes them.

    Returns:
        The exit code: 0 if the flags fit together, 1 if not, 2 if nothing can be said.
    """
    return _run("plan", "Say what flags would capture, without a GPU.", arguments)


def explain(arguments: Sequence[str]) -> int:
    """Print which parts of a model run in graphs, and what to change for the others; as ``plan``."""
    return _run("explain", "Say which parts of a model flags would put in graphs.", arguments)


def _run(name: str, description: str, arguments: Sequence[str]) -> int:
    try:
        own, given = _own_arguments(name, description, arguments)
        command = _module_without_gpu(name)
        from .flags import read_flags

        flags = read_flags(given, own.world_size)
    except SystemExit as end:
        return int(end.code or 0)
    if flags.refused:
        print("\n".join(flags.verdict()))
        return 1
    try:
        said = list(command.lines(own, given, flags))
    except Exception as error:
        return _not_built(error)
    print("\n".join(said))
    return 0


def _own_arguments(name: str, description: str, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command's own arguments, and return them and the flags of the training.

    Raises:
        SystemExit: help was asked for (0), or there are no flags of a training (2).
    """
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
    own, flags = parser.parse_known_args(arguments)
    if not flags:
        parser.error("give the flags of a training, those that pretrain_gpt.py takes")
    if own.world_size is not None and own.world_size < 1:
        parser.error(f"--world-size must be a positive number of ranks, got {own.world_size}")
    return own, flags


def _module_without_gpu(name: str) -> Any:
    """Return the module of a command, after code for GPUs runs in this process, whether there is a GPU or not.

    It runs as on a GPU of compute capability 9.0.

    Raises:
        SystemExit: with 2, after saying what to do: the patch is off.
    """
    import torch  # noqa: F401, turns the patch on

    if not overlay.is_active():
        print(why_off(), file=sys.stderr)
        raise SystemExit(2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from ..cpu_backend.install import install

    install()
    with quietly():
        return importlib.import_module(f".{name}", __package__)


def _not_built(error: Exception) -> int:
    """Say why the model of accepted flags cannot be built here; return the exit code.

    That is 2 if only this process lacks something: a package, or the size of a vocabulary.
    """
    from .dry_stage import UnknownVocabularyError
    from .flags import said_by

    if isinstance(error, UnknownVocabularyError):
        print(error, file=sys.stderr)
        return 2
    print(f"megatron-core cannot build the model here: {said_by(error)}", file=sys.stderr)
    return 2 if isinstance(error, ImportError) else 1
