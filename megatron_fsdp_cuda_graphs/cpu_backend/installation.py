"""Install the backend, and let the process exit while threads of gloo still run."""

import atexit
import os
import sys
import threading
from typing import NoReturn

import torch

from . import patches

_installed = False


def installed() -> bool:
    """Return whether this process runs on the CPU backend."""
    return _installed


def install() -> None:
    """Make ``torch.cuda`` work on CPU tensors in this process. Further calls do nothing.

    Call it before importing megatron. In megatron modules that are already imported, it replaces module-level
    references to torch's functions. Operators use one thread, or ``OMP_NUM_THREADS``, because the order of torch's sums
    depends on the number of threads, whose default depends on the host.

    Raises:
        RuntimeError: A GPU is visible.
        ValueError: ``OMP_NUM_THREADS`` is not an integer.
    """
    global _installed
    if installed():
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            "a GPU is visible, and the CPU backend would hide it from this process. Set CUDA_VISIBLE_DEVICES='' to "
            "use the CPU backend; to use the GPU, do not install it."
        )
    threads = int((os.environ.get("OMP_NUM_THREADS") or "1").partition(",")[0])  # one number per level of nesting
    from . import device, distributed, generators, memory, streams, tape

    _hide_compilers()
    for part in (streams, memory, generators, device, tape, distributed):
        part.install()
    _installed = True
    torch.set_num_threads(threads)
    patches.rebind_early_names()


def leave(code: str | int | None = 0) -> NoReturn:
    """End this process like ``sys.exit(code)``, after joining its threads and running its exit functions.

    Skips interpreter finalization: a gloo thread that frees a tensor during it would abort the process ("terminate
    called without an active exception").
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
    """Prevent imports of TransformerEngine, and disable dynamo, which would hide operators from the backend.

    An already imported TransformerEngine is kept, because importing it again may fail without a GPU.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo.config" in sys.modules:
        patches.patch(sys.modules["torch._dynamo.config"], "disable", True)
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
