"""Turns a recorded operator into a call that has the same effect on memory, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

Step = Callable[[], Any]
# where a result goes: its place among the tensors that the operator returns, and the memory it had at capture
Targets = list[tuple[int, torch.Tensor]]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in ``tree``, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def make_step(func: torch._ops.OpOverload, args: tuple, kwargs: dict, targets: Targets) -> Step:
    """Return a call that runs ``func`` on ``args`` and puts its new results into ``targets``."""
    run = functools.partial(func._op, *args, **kwargs)
    if not targets:
        return run

    def step() -> None:
        results = tensors_in(run())
        for place, target in targets:
            target.copy_(results[place])

    return step
