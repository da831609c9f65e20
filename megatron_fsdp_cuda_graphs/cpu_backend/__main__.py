"""Runs a program written for CUDA on the CPU backend.

    python -m megatron_fsdp_cuda_graphs.cpu_backend SCRIPT [ARGS...]
    python -m megatron_fsdp_cuda_graphs.cpu_backend -m MODULE [ARGS...]
    python -m megatron_fsdp_cuda_graphs.cpu_backend --list

The first two start the program as python would, with the backend installed. ``--list`` prints every name of torch that
the backend replaces, each with the reason. Under torchrun, write ``-m megatron_fsdp_cuda_graphs.cpu_backend`` in front
of the script.
"""

import runpy
import sys
from pathlib import Path

from .installation import install, leave
from .patches import APPLIED

USAGE = "usage: python -m megatron_fsdp_cuda_graphs.cpu_backend (SCRIPT | -m MODULE | --list | --help) [ARGS...]"


def main(arguments: list[str]) -> None:
    """Install the backend, then run ``arguments`` as python would.

    Raises:
        SystemExit: there is no script or module among the arguments, or the program raised it.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    if not arguments or arguments == ["-m"]:
        sys.exit(USAGE)
    install()
    if arguments == ["--list"]:
        print(*APPLIED, sep="\n")
        return
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
