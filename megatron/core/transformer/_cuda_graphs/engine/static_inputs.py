"""Static inputs: distinct tensors within a slot, shared between slots whose lifetimes do not overlap."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from .addresses import address_of
from .buffers import BufferPool, Lease
from .plan import Pass, Plan


def share_inputs[Inputs](
    plan: Plan, signature_of: Callable[[int], Hashable], inputs_of: Callable[[int], Inputs]
) -> list[Inputs]:
    """Return the inputs of every slot of ``plan``.

    A slot's inputs are in use from its forward pass to its last pass. After that the next forward pass with the same
    signature uses them, first freed first.

    Args:
        plan: The passes in the order in which they run.
        signature_of: Returns a key for a slot: only slots with equal keys share inputs.
        inputs_of: Returns the inputs of a slot; called only for slots that need inputs of their own.
    """
    pool = BufferPool[Inputs]()
    leases: dict[int, Lease[Inputs]] = {}
    last_steps = plan.last_steps()
    for step in plan.steps:
        if step.kind is Pass.FORWARD:
            leases[step.slot] = pool.acquire(signature_of(step.slot), partial(inputs_of, step.slot))
        elif step in last_steps:
            pool.release(leases[step.slot])
    return [leases[slot].buffers for slot in range(len(plan.callable_of_slot))]


def distinct(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return inputs into which those of replays can be copied one by one.

    A tensor that shares memory with another (because it occurs twice, say) gets memory of its own: a replay may be
    given two different ones. An expanded tensor, whose elements share memory, becomes a dense one.
    """
    taken: list[_Span] = []

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if _is_expanded(leaf) or _overlaps(leaf, taken):
            return _dense_copy(leaf)
        taken.extend(_span_of(leaf))
        return leaf

    return tree_map(own, (args, kwargs))


def keep_apart(plan: Plan, inputs: Sequence[tuple[tuple, dict[str, Any]]]) -> list[tuple[tuple, dict[str, Any]]]:
    """Give slots whose lives overlap their own memory for inputs that require grad.

    Where capture was given one activation for several slots, the forward pass of a later slot would overwrite what the
    backward pass of an earlier one reads. Inputs that require no grad (masks, position embeddings) may be the same for
    all slots, and stay shared.

    Args:
        plan: The passes in the order in which they run; a slot lives from its forward pass to its last one.
    """
    last_steps = plan.last_steps()
    apart = list(inputs)
    taken: dict[int, list[_Span]] = {}
    for step in plan.steps:
        if step.kind is Pass.FORWARD:
            others = [span for spans in taken.values() for span in spans]

            def own(leaf: Any, others: list[_Span] = others) -> Any:
                shared = isinstance(leaf, torch.Tensor) and leaf.requires_grad and _overlaps(leaf, others)
                return _dense_copy(leaf) if shared else leaf

            apart[step.slot] = tree_map(own, inputs[step.slot])
            leaves = [leaf for leaf in tree_leaves(apart[step.slot]) if isinstance(leaf, torch.Tensor)]
            taken[step.slot] = [span for leaf in leaves if leaf.requires_grad for span in _span_of(leaf)]
        elif step in last_steps:
            del taken[step.slot]
    return apart


_Span = tuple[int, int]  # the first address of a tensor, and the one behind its last element


def _span_of(tensor: torch.Tensor) -> list[_Span]:
    """Where ``tensor`` lies; nothing for one without elements or of another layout."""
    start = address_of(tensor) if tensor.layout is torch.strided and tensor.numel() else 0
    if not start:
        return []
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return [(start, start + (last + 1) * tensor.element_size())]


def _overlaps(tensor: torch.Tensor, taken: Iterable[_Span]) -> bool:
    return any(
        start < other_end and other_start < end for start, end in _span_of(tensor) for other_start, other_end in taken
    )


def _dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)


def _is_expanded(tensor: torch.Tensor) -> bool:
    strided = tensor.layout is torch.strided
    return strided and any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def signature(args: tuple, kwargs: Mapping[str, Any]) -> Hashable:
    """Return the structure of inputs, with shape, dtype and layout in place of tensors; keyword order is ignored."""
    leaves, structure = tree_flatten((args, sorted(kwargs.items())))
    return repr(structure), tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.layout, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for leaf in leaves
    )
