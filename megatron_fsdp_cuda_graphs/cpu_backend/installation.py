"""Turns the backend on and off for this process, and ends it."""

import atexit
import os
import sys
import threading
from typing import NoReturn

import torch

from . import patches

THREADS = "OMP_NUM_THREADS"
_threads_before = 0


def installed() -> bool:
    """Whether this process runs on the CPU backend."""
    return bool(patches.APPLIED)


def install() -> None:
    """Let ``torch.cuda`` work on CPU tensors from here on, in this process. A second call changes nothing.

    Call it before megatron is imported. A megatron that is imported already gets the replaced functions wherever it
    holds torch's by a name of its own at module level. Operators get one thread, or ``OMP_NUM_THREADS``: torch sums in
    another order with another number of threads, and its default depends on the host.

    Raises:
        RuntimeError: A GPU is visible.
        ValueError: ``OMP_NUM_THREADS`` is no number of threads.
    """
    global _threads_before
    if installed():
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            "a GPU is visible, and the CPU backend would hide it from this process. Set CUDA_VISIBLE_DEVICES='' to "
            "run on the CPU backend, or run without it."
        )
    given = os.environ.get(THREADS) or "1"
    threads = given.partition(",")[0].strip()  # a list has one number for each level of nesting
    if not threads.isdecimal() or not int(threads):
        raise ValueError(f"{THREADS} is {given!r}: set it to a number of threads, or unset it for one")
    from . import device, distributed, generators, memory, streams, tape

    _hide_compilers()
    for part in (streams, memory, generators, device, tape, distributed):
        part.install()
    _threads_before = torch.get_num_threads()
    torch.set_num_threads(int(threads))
    patches.rebind_early_names()


def uninstall() -> None:
    """Undo ``install``, for test suites that share a process.

    Tensors, graphs, streams and generators made on the backend cannot be used afterwards.

    Raises:
        RuntimeError: A capture is under way.
    """
    if not installed():
        return
    from . import generators, streams

    if streams.current_capture() is not None:
        raise RuntimeError("end the graph capture under way before the CPU backend is uninstalled")
    generators.uninstall()
    torch.set_num_threads(_threads_before)
    streams.set_stream(streams.default_stream())
    patches.undo_all()


def leave(code: str | int | None = 0) -> NoReturn:
    """End this process with ``code``, as ``sys.exit`` takes it, after its threads, exit functions and output.

    The interpreter is not taken apart: gloo's threads live until then, and one that drops a tensor while Python
    finalizes aborts the process ("terminate called without an active exception").
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
    status = code if isinstance(code, int) else int(code is not None)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # joins threads that are not daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status & 0xFF)


def _hide_compilers() -> None:
    """Turn dynamo off, here and in child processes, and let ``import transformer_engine`` raise ImportError.

    A TransformerEngine that is imported already stays; without a GPU its import may fail.
    """
    why = "compiled code hides its operators"
    if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
        patches.patch_entry(os.environ, "os.environ", "TORCHDYNAMO_DISABLE", "1", why)
    if "torch._dynamo.config" in sys.modules:
        patches.patch(sys.modules["torch._dynamo.config"], "disable", True, why)
    if "transformer_engine" not in sys.modules:
        patches.patch_entry(sys.modules, "sys.modules", "transformer_engine", None, "its kernels run on GPUs only")
