"""What the commands ``plan`` and ``explain`` share: their own arguments, and the process in which they run."""

import argparse
import os
import sys
from collections.abc import Sequence

from .. import overlay
from ..doctor import why_off


def own_arguments(name: str, description: str, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
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


def need_no_gpu() -> None:
    """Let code for GPUs run in this process as on a GPU of compute capability 9.0, whether there is one or not.

    Raises:
        SystemExit: with 2, after saying what to do: the patch is off.
    """
    import torch  # noqa: F401, turns the patch on

    if not overlay.is_active():
        print(why_off(), file=sys.stderr)
        raise SystemExit(2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from ..cpu_backend.install import install
    from .quiet import quietly

    install()
    with quietly():
        from . import dry_stage  # noqa: F401


def not_built(error: Exception) -> int:
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
