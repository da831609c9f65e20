"""The leaves of autograd's graph behind tensors."""

from collections.abc import Iterable

import torch


def connected_leaves(outputs: Iterable[torch.Tensor], stops: Iterable[torch.Tensor] = ()) -> list[torch.Tensor]:
    """Return the leaves that require grad and from which ``outputs`` were computed, each once, in arbitrary order.

    Args:
        stops: Tensors at which it stops: the backward pass ends there.
    """
    outputs = list(outputs)
    leaves = {id(tensor): tensor for tensor in outputs if tensor.is_leaf and tensor.requires_grad}
    seen = {tensor.grad_fn for tensor in stops if tensor.grad_fn is not None}
    nodes = list({tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None} - seen)
    seen.update(nodes)
    while nodes:
        node = nodes.pop()
        if isinstance(node, torch._C._functions.AccumulateGrad):
            leaves[id(node.variable)] = node.variable
        following = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= following
        nodes += following
    return list(leaves.values())
