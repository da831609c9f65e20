"""Static inputs: apart within a slot, shared between slots of a plan whose lives do not overlap."""

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
    """Give every slot of ``plan`` its inputs.

    A slot's inputs live from its forward pass to its last pass. After that they serve the next forward pass whose
    inputs have the same signature; those that were freed first are taken first.

    Args:
        plan: The passes in the order in which they run.
        signature_of: What the inputs of a slot must have in common with others to be shared.
        inputs_of: The inputs of a slot; called only for slots that need inputs of their own.
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
    """Return inputs that replays can be copied to one by one.

    A tensor object that is there twice becomes two: replays may be given two where capture was given one. A tensor some
    of whose elements share memory (an expanded one) becomes a dense one.
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
    """The structure of inputs, with shape, dtype and layout in place of each tensor; keywords in any order."""
    leaves, structure = tree_flatten((args, sorted(kwargs.items())))
    return repr(structure), tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.layout, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for leaf in leaves
    )
