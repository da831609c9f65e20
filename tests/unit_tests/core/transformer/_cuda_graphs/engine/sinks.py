"""A gradient sink whose every number can be compared, and the replays of a step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

from megatron.core.transformer._cuda_graphs.engine.captured import GraphOwner


class Buckets(GraphOwner):
    """Takes gradients into buffers of its own, one for each parameter.

    Args:
        module: The module whose gradients it takes.
        takes: Which of its parameters.

    Attributes:
        grads: The buffers, in the order of the parameters.
        given: What ``take`` was called with, without the gradients' memory.
        events: The calls before and after each backward graph.
    """

    def __init__(self, module: torch.nn.Module, takes: Callable[[torch.Tensor], bool] = lambda param: True):
        self.params = list(module.parameters())
        self.grads = [torch.full_like(param, 100.0) for param in self.params]
        self.given: list[list[tuple[torch.Tensor, torch.Size | None]]] = []
        self.events: list[str] = []
        self._takes = takes

    def take(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Copy what it takes to the buffers; an unused parameter gets zeros."""
        self.given.append(
            [(param, None if grad is None else grad.shape) for param, grad in zip(params, grads, strict=True)]
        )
        index = {id(param): i for i, param in enumerate(self.params)}
        left: list[torch.Tensor | None] = []
        for param, grad in zip(params, grads, strict=True):
            if not self._takes(param):
                left.append(grad)
                continue
            left.append(None)
            bucket = self.grads[index[id(param)]]
            with torch.no_grad():
                bucket.zero_() if grad is None else bucket.copy_(grad)
        return left

    def before_backward(self) -> None:
        """Note the call."""
        self.events.append("before backward")

    def after_backward(self) -> None:
        """Note the call."""
        self.events.append("after backward")


@contextmanager
def replays() -> Iterator[list[torch.cuda.CUDAGraph]]:
    """The graphs that are replayed in the context, each as often as it is."""
    replayed: list[torch.cuda.CUDAGraph] = []
    replay = torch.cuda.CUDAGraph.replay

    def noting(graph: torch.cuda.CUDAGraph) -> None:
        replayed.append(graph)
        replay(graph)

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", noting):
        yield replayed
