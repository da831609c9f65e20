"""The leaves of autograd's graph behind tensors."""

from collections.abc import Iterable

import torch


def connected_leaves(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves that require grad and from which ``outputs`` were computed, each once, in no certain order."""
    outputs = list(outputs)
    leaves = {id(tensor): tensor for tensor in outputs if tensor.is_leaf and tensor.requires_grad}
    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad node
        if leaf is not None:
            leaves[id(leaf)] = leaf
        following = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= following
        nodes += following
    return list(leaves.values())
