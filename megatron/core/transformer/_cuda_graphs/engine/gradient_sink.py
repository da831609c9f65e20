"""Who takes the gradients of a callable's parameters in the place of autograd."""

from collections.abc import Sequence
from typing import Protocol

import torch


class AroundBackward(Protocol):
    """What runs around the replays of a backward graph."""

    def before_backward(self) -> None:
        """Called right before each replay of the backward graph, on the stream of the backward pass."""

    def after_backward(self) -> None:
        """Called right after each replay of the backward graph, on the stream of the backward pass."""


class GradientSink(AroundBackward, Protocol):
    """Takes the gradients of one callable's parameters inside its backward graph.

    Autograd hands each gradient to a node and the hooks of its parameter, in every backward pass. What is taken here
    costs the host nothing at a replay, and the graph's memory for it is free for the next graph.
    """

    def take(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Called once, while the backward graph is recorded; what it computes is a part of the graph.

        Args:
            params: The parameters that require grad.
            grads: Their gradients; None for a parameter that the callable does not use.

        Returns:
            ``grads`` with None in place of each gradient that was taken; the others go to autograd.
        """
