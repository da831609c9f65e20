"""Calls before and after the backward pass of a module, for which autograd has no hooks of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_map, tree_unflatten


class RunAfterBackward(torch.autograd.Function):
    """An identity function of tensors, whose backward pass first calls a handler."""

    @staticmethod
    def forward(ctx: Any, handler: Callable[[], object], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handler = handler
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.handler()
        return None, *grads


_PLAIN = (torch.Tensor, type(None), bool, int, float, str)  # what layers are mostly called with


def call_after_backward(handler: Callable[[], object], args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Make autograd call ``handler`` once the backward pass of a module that gets these arguments is over.

    Returns the arguments to give it, whose tensors went through an identity function: the module must not change them
    in place. None if no tensor among them requires a gradient: nothing will be called.
    """
    leaves, spec = [*args, *kwargs.values()], None
    if not _are_leaves(leaves):
        leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.requires_grad]
    if not places:
        return None
    wrapped = RunAfterBackward.apply(handler, *(leaves[i] for i in places))
    for place, tensor in zip(places, wrapped, strict=True):
        leaves[place] = tensor
    if spec is not None:
        return tree_unflatten(leaves, spec)
    return tuple(leaves[: len(args)]), dict(zip(kwargs, leaves[len(args) :], strict=True))


def call_before_backward(handler: Callable[[Any], object], output: Any) -> Any:
    """Make autograd call ``handler`` with the gradients at the first gradient of ``output``, what a module returned.

    Returns the output to take in its place. Its tensors are views, so that one that is also an input is a tensor of its
    own.
    """
    if torch.is_tensor(output):
        output = output.view_as(output)
    elif type(output) is tuple and _are_leaves(output):
        output = tuple(map(_view_of, output))
    else:
        output = tree_map(_view_of, output)
    tensors = [output] if torch.is_tensor(output) else output if isinstance(output, (tuple, list)) else []
    torch.autograd.graph.register_multi_grad_hook(
        [tensor for tensor in tensors if torch.is_tensor(tensor)], handler, mode="any"
    )
    return output


def _are_leaves(values: Sequence[Any]) -> bool:
    """Whether none of ``values`` is a container with tensors in it: walking through one costs the host many calls."""
    return all(map(tree_is_leaf, [value for value in values if not isinstance(value, _PLAIN)]))


def _view_of(leaf: Any) -> Any:
    return leaf.view_as(leaf) if torch.is_tensor(leaf) else leaf
