"""Turns one recorded operator into the quickest call that has the same effect on memory, to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

Step = Callable[[], Any]
# where a result goes: its place among the tensors that the operator returns, and the memory it had at capture
Targets = list[tuple[int, torch.Tensor]]

_COPIES = {"_to_copy", "clone"}
_ZEROS = {"zeros", "zeros_like", "new_zeros"}
_OPTIONS = {"dtype", "layout", "device", "pin_memory"}


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in ``tree``, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def make_step(func: torch._ops.OpOverload, args: tuple, kwargs: dict, targets: Targets) -> Step:
    """Return a call that runs ``func`` on ``args`` and puts its new results into ``targets``."""
    name = func._schema.name.split("::")[-1]
    if not targets:
        return functools.partial(func._op, *args, **kwargs)
    if name in _COPIES and len(targets) == 1:
        return functools.partial(targets[0][1].copy_, args[0])
    if name in _ZEROS and len(targets) == 1:
        return targets[0][1].zero_
    out = out_variant(func)
    if out is not None and len(targets) == len(func._schema.returns):
        call, names, dropped = out
        kept = {k: v for k, v in kwargs.items() if k not in dropped}
        return functools.partial(call, *args, **kept, **dict(zip(names, (t for _, t in targets), strict=True)))
    if len(targets) == 1 and len(func._schema.returns) == 1 and str(func._schema.returns[0].type) == "Tensor":
        return _copy_result(func._op, args, kwargs, targets[0][1])
    return _copy_results(func._op, args, kwargs, targets)


def _copy_result(call: Callable, args: tuple, kwargs: dict, target: torch.Tensor) -> Step:
    def step() -> None:
        target.copy_(call(*args, **kwargs))

    return step


def _copy_results(call: Callable, args: tuple, kwargs: dict, targets: Targets) -> Step:
    def step() -> None:
        results = tensors_in(call(*args, **kwargs))
        for place, target in targets:
            target.copy_(results[place])

    return step


@functools.cache
def out_variant(func: torch._ops.OpOverload) -> tuple[Callable, list[str], set[str]] | None:
    """The overload that writes into given tensors, the names of those arguments, and what it does not take.

    ``None`` where there is none, or where ``func`` writes to its arguments itself.
    """
    schema = func._schema
    if schema.is_mutable or any(str(r.type) != "Tensor" for r in schema.returns):
        return None
    wanted = [(a.name, str(a.type)) for a in schema.arguments]
    packet = func.overloadpacket
    for overload in packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        outs = [a.name for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write]
        others = [(a.name, str(a.type)) for a in arguments if a.name not in outs]
        if len(outs) != len(schema.returns):
            continue
        missing = [a for a in wanted if a not in others]
        if [a for a in wanted if a in others] == others and {name for name, _ in missing} <= _OPTIONS:
            return getattr(packet, overload)._op, outs, {name for name, _ in missing}
    return None
