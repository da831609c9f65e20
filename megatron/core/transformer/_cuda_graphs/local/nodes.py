"""The autograd nodes of a runner, for recorded passes and for replays, and how its graphs are replayed."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from ..engine.replay import Replay, ReplayNode, fast_apply
from ..errors import NoGraphError
from .memory import StaticInput
from .turns import Turns


class _GraphStatus(Enum):
    """Which pass of a runner comes next."""

    FWD_READY = 0
    BWD_READY = 1


class _CudagraphRecordNode(torch.autograd.Function):
    """An identity on the outputs of a recorded module, whose backward runs when that of a replay would."""

    @staticmethod
    def forward(ctx: Any, runner: Any, *inputs: torch.Tensor) -> Any:
        """Return ``inputs``, the outputs of the module that require grad, unchanged.

        Raises:
            RuntimeError: the runner waits for its backward pass.
        """
        runner.expect(_GraphStatus.FWD_READY)
        ctx.runner = runner
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Record the runner's first backward pass; return ``grads`` unchanged.

        Raises:
            RuntimeError: the runner waits for its forward pass.
        """
        ctx.runner.record_backward()
        return None, *grads


class _CudagraphReplayNode(ReplayNode):
    """Replays the graphs of a runner with autograd, between what the runner does before and after them."""

    @staticmethod
    def forward(ctx: Any, runner: Any, is_first_microbatch: bool, *inputs: torch.Tensor) -> Any:
        """Replay the forward graph of ``runner``.

        Args:
            inputs: The tensors among the arguments, then the parameters that get a gradient.

        Raises:
            RuntimeError: see ``_CudaGraphRunner.begin_forward``.
        """
        ctx.runner = runner
        return ReplayNode.forward(ctx, *runner.begin_forward(is_first_microbatch), *inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Replay the backward graph.

        Raises:
            RuntimeError: see ``_CudaGraphRunner.begin_backward``.
        """
        ctx.runner.begin_backward()
        results = ReplayNode.backward(ctx, *grads)
        ctx.runner.end_backward()
        return results


# Replays a runner with autograd: the runner, whether it is the first micro-batch, the inputs, then the parameters.
replay_runner: Callable[..., tuple[torch.Tensor, ...]] = fast_apply(_CudagraphReplayNode)


class LocalReplay(Replay):
    """A ``Replay`` whose static inputs may be shared with other graphs.

    Args:
        runners: Which of them are between their forward and backward pass.
        static_inputs: The static inputs, each with the set of runners (a bit each) that need its value from their
            forward to their backward pass.
        captured, options: The arguments of ``Replay``.
    """

    def __init__(self, runners: Turns, static_inputs: list[tuple[StaticInput, int]], *captured: Any, **options: Any):
        super().__init__(*captured, **options)
        self._runners, self._static_inputs = runners, static_inputs

    def place(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy ``inputs`` to the static inputs of the forward graph.

        Raises:
            NoGraphError: that would overwrite a value that another graph's backward pass still needs.
        """
        in_flight = self._runners.in_flight
        for (static, users), given in zip(self._static_inputs, inputs):  # noqa: B905
            if not static.put(given, bool(in_flight & users)):
                raise NoGraphError(
                    f"{self.name}: at capture an input of shape {tuple(given.shape)} was one tensor for several graphs "
                    "or came straight from another graph, and now it is another tensor. With --cuda-graph-impl local "
                    "every step must pass tensors from layer to layer as the first one did."
                )

    def reset(self) -> None:
        super().reset()
        self._static_inputs = []
