"""The end of a rank: the process goes without taking the interpreter apart.

gloo's threads live until then, and one that drops a tensor while Python finalizes aborts the process ("terminate called
without an active exception").
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def leave(code: str | int | None = 0) -> NoReturn:
    """End this process with ``code``, as ``sys.exit`` takes it: after its threads, exit functions and output."""
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
