"""How many threads an operator has: one, or what ``OMP_NUM_THREADS`` says.

torch sums in another order with another number of threads. Left alone it takes one for each core of the host, torchrun
sets the variable to 1 only where it starts several processes, and MKL lowers a number above that of the cores: the same
training would have other numbers on two hosts of one rank each than on one host of two.
"""

import os

import torch

VARIABLE = "OMP_NUM_THREADS"
_before = 0


def install() -> None:
    """Set the number of threads.

    Raises:
        ValueError: ``OMP_NUM_THREADS`` is no number of threads.
    """
    global _before
    given = os.environ.get(VARIABLE) or "1"
    outermost = given.partition(",")[0].strip()  # a list has one number for each level of nesting
    if not outermost.isdecimal() or not int(outermost):
        raise ValueError(f"{VARIABLE} is {given!r}: set it to a number of threads, or unset it for one")
    _before = torch.get_num_threads()
    torch.set_num_threads(int(outermost))


def uninstall() -> None:
    """Set the number of before."""
    torch.set_num_threads(_before)
