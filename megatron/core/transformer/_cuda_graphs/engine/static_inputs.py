"""Static inputs: distinct tensors within a slot, shared between slots whose lifetimes do not overlap."""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

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

    A tensor object that occurs twice becomes two tensors: a replay may be given two different ones. An expanded tensor,
    whose elements share memory, becomes a dense one.
    """
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in seen and not _is_expanded(leaf):
            seen.add(id(leaf))
            return leaf
        return leaf.detach().clone(memory_format=torch.contiguous_format).requires_grad_(leaf.requires_grad)

    return tree_map(own, (args, kwargs))


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
