"""Turns the backend on and off for this process, and ends it."""

import atexit
import os
import sys
import threading
from typing import NoReturn

import torch

from . import patches


def installed() -> bool:
    """Whether this process runs on the CPU backend."""
    return bool(patches.APPLIED)


def install() -> None:
    """Let ``torch.cuda`` work on CPU tensors from here on, in this process. A second call changes nothing.

    Call it before megatron is imported. A megatron that is imported already gets the replaced functions wherever it
    holds torch's by a name of its own at module level.

    Raises:
        RuntimeError: a GPU is visible.
    """
    if installed():
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            "a GPU is visible, and the CPU backend would hide it from this process. Set CUDA_VISIBLE_DEVICES='' to "
            "run on the CPU backend, or run without it."
        )
    from . import (
        addresses,
        collectives,
        compiler,
        cuda_graph,
        device,
        device_names,
        distributed,
        generators,
        streams,
        threads,
    )
    from . import held_results as held

    memory = (addresses, generators, device_names, cuda_graph)
    for part in (compiler, device, streams, *memory, distributed, collectives, held, threads):
        part.install()
    patches.rebind_early_names()


def uninstall() -> None:
    """Undo ``install``, for test suites that share a process.

    Tensors, graphs, streams and generators made on the backend cannot be used afterwards.

    Raises:
        RuntimeError: a capture is under way.
    """
    if "megatron_fsdp_cuda_graphs.cpu_backend.cuda_graph" not in sys.modules or not installed():
        return
    from . import capture_state, generators, streams, threads

    if capture_state.current() is not None:
        raise RuntimeError("end the graph capture under way before the CPU backend is uninstalled")
    generators.uninstall()
    threads.uninstall()
    streams.set_stream(streams.default_stream())
    patches.undo_all()


def leave(code: str | int | None = 0) -> NoReturn:
    """End this process with ``code``, as ``sys.exit`` takes it: after its threads, exit functions and output.

    The interpreter is not taken apart: gloo's threads live until then, and one that drops a tensor while Python
    finalizes aborts the process ("terminate called without an active exception").
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
    status = code if isinstance(code, int) else int(code is not None)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # joins the threads that are no daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status & 0xFF)
