"""What the commands ``plan`` and ``explain`` share: their arguments, the process in which they run, their ends."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .. import overlay
from ..doctor import why_off

if TYPE_CHECKING:
    from .flags import Flags


def run(
    name: str,
    description: str,
    arguments: Sequence[str],
    lines: "Callable[[argparse.Namespace, list[str], Flags], Iterable[str]]",
) -> int:
    """Run a command: read its arguments and the flags of a training, and print what they are said to do.

    Args:
        name: The command.
        description: What it does.
        arguments: Its own arguments, and flags as ``pretrain_gpt`` takes them.
        lines: Says it, given the own arguments, the others, and the flags, which fit together.

    Returns:
        The exit code: 0 if the flags fit together, 1 if not, 2 if nothing can be said.
    """
    try:
        own, given = _own_arguments(name, description, arguments)
        _need_no_gpu()
        from .flags import read_flags

        flags = read_flags(given, own.world_size)
    except SystemExit as end:
        return int(end.code or 0)
    if flags.refused:
        print("\n".join(verdict(flags)))
        return 1
    try:
        said = list(lines(own, given, flags))
    except Exception as error:
        return _not_built(error)
    print("\n".join(said))
    return 0


def verdict(flags: "Flags") -> Iterator[str]:
    """Yield lines that say whether flags fit together, and of what job they are."""
    yield "The flags do not fit together:" if flags.refused else "The flags fit together."
    yield from bulleted(flags.refused)
    if flags.remarks:
        yield from ("", "Remarks:", *bulleted(flags.remarks))
    if flags.refused:
        return
    args = flags.args
    sizes = {
        "data": args.data_parallel_size,
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "context": args.context_parallel_size,
        "expert": args.expert_model_parallel_size,
    }
    yield f"Ranks: {args.world_size} (--world-size); parallel: {', '.join(f'{k} {v}' for k, v in sizes.items())}"


def bulleted(texts: Sequence[str]) -> list[str]:
    """Return ``texts`` as items of a list."""
    return [f"- {text}" for text in texts]


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


def _need_no_gpu() -> None:
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
