"""Record the calls of a gradient sink, and graph replays."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

from megatron.core.transformer._cuda_graphs.engine.captured import GraphOwner


class Buckets(GraphOwner):
    """Copies gradients to its own buffers, one per parameter.

    Args:
        module: Module that owns the parameters.
        takes: Returns whether to take the gradient of a parameter.

    Attributes:
        grads: Buffers, in the order of the parameters.
        shapes: Gradient shapes in each call of ``consume_gradients``, None for unused parameters.
        events: Calls of ``before_backward`` and ``after_backward``, in order.
    """

    def __init__(self, module: torch.nn.Module, takes: Callable[[torch.Tensor], bool] = lambda param: True):
        self.params = list(module.parameters())
        self.grads = [torch.full_like(param, 100.0) for param in self.params]
        self.shapes: list[list[torch.Size | None]] = []
        self.events: list[str] = []
        self._takes = takes

    def consume_gradients(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Copy the selected gradients to the buffers, and return the others.

        A missing gradient zeroes its buffer.
        """
        self.shapes.append([None if grad is None else grad.shape for grad in grads])
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
        self.events.append("before backward")

    def after_backward(self) -> None:
        self.events.append("after backward")


@contextmanager
def replays() -> Iterator[list[torch.cuda.CUDAGraph]]:
    """Yield a list that collects each graph replayed in the context, once per replay."""
    replayed: list[torch.cuda.CUDAGraph] = []
    replay = torch.cuda.CUDAGraph.replay

    def noting(graph: torch.cuda.CUDAGraph) -> None:
        replayed.append(graph)
        replay(graph)

    with mock.patch.object(torch.cuda.CUDAGraph, "replay", noting):
        yield replayed
