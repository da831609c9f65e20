"""Imports each module in a process of its own, as the first of megatron-core: python import_each.py MODULE ...

Exits with 1 if one cannot be imported, and says why.
"""

import os
import sys
import traceback

import torch


def imported(name: str) -> bool:
    """Import the module in a fork of this process."""
    child = os.fork()
    if child == 0:
        try:
            __import__(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    failed = [name for name in sys.argv[1:] if not imported(name)]
    print(*(f"cannot be imported: {name}" for name in failed), sep="\n", end="\n" * bool(failed))
    sys.exit(bool(failed))
