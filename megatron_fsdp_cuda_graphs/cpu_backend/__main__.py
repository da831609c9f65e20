"""Run a program written for CUDA on the CPU backend. Takes the same arguments as python.

    python -m megatron_fsdp_cuda_graphs.cpu_backend SCRIPT [ARGS...]
    python -m megatron_fsdp_cuda_graphs.cpu_backend -m MODULE [ARGS...]

Under torchrun, insert ``-m megatron_fsdp_cuda_graphs.cpu_backend`` before the script.
"""

import runpy
import sys
from pathlib import Path

from .installation import install, leave


def main(arguments: list[str]) -> None:
    """Install the backend, and run ``arguments`` as python does.

    Raises:
        SystemExit: No script or module is given, or the program raised it.
    """
    if not arguments or arguments == ["-m"] or arguments[0] in ("-h", "--help"):
        sys.exit(__doc__)
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SystemExit as end:
        leave(end.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        leave(1)
    leave()
