"""Collectives in a capture: they move nothing at capture, and run in the order of the tape at each replay.

A replay waits for its peers where it stands, so ranks must replay the same graphs in the same order, as with NCCL. A
capture waits for no one: a rank whose capture fails leaves none behind in it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, Work
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from . import capture_state
from .patches import wrap

# these make the host wait for the other ranks
_WAITING = {"barrier", "monitored_barrier_"}


def is_collective(func: torch._ops.OpOverload) -> bool:
    """Whether ``func`` is an operator of torch.distributed that can be run again from its arguments."""
    return func.namespace == "c10d" and func._schema.name.split("::")[-1] not in _WAITING


def without_communication(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """Return what the collective would return, its work done.

    What it would have written stays as it is; integers become zero, so that they may serve as indices and sizes.
    """
    output = args[0] if args else next(iter(kwargs.values()))
    for tensor in tree_flatten(output)[0]:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            tensor.zero_()
    results = [FakeWork().boxed() if "Work" in str(kind.type) else output for kind in func._schema.returns]
    return tuple(results) if len(results) > 1 else next(iter(results), None)


def _wait(call: Callable, work: Work, *args: Any) -> bool:
    if capture_state.current() is None:
        return call(work, *args)
    with _disable_current_modes():
        return call(work, *args)


def install() -> None:
    """Keep what gloo does in a wait off the tape: it copies results to where they belong."""
    wrap(Work, "wait", _wait, "gloo copies results when it is waited for: no work of the capture")


def make_collective_step(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Callable[[], None]:
    """Return a call that runs the collective and waits for it."""
    call = func._op

    def step() -> None:
        for result in tree_flatten(call(*args, **kwargs))[0]:
            if isinstance(result, torch.ScriptObject):
                Work.unbox(result).wait()

    return step
