"""The autograd nodes of local graphs: one that records, one that replays."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import torch

from ..engine.replay import Replay, ReplayNode, ReplayOptions, Tensors
from .buffers import StaticInput
from .turns import Turns


class _GraphStatus(Enum):
    """Which pass of a runner comes next."""

    FWD_READY = 0
    BWD_READY = 1


class RecordedRunner(Protocol):
    """What the node of a recorded pass asks of its runner."""

    @property
    def name(self) -> str:
        """What errors call it."""

    def expect(self, status: _GraphStatus) -> None:
        """Refuse a pass that is not due."""

    def record_backward(self) -> None:
        """Note that the backward pass runs."""


class ReplayedRunner(Protocol):
    """What the node of a replay asks of its runner."""

    @property
    def name(self) -> str:
        """What errors call it."""

    def begin_forward(self) -> "LocalReplay":
        """Check that the forward graph may be replayed, and return what replays it."""

    def replay_options(self, is_first_microbatch: bool) -> ReplayOptions | None:
        """What the replay needs besides its inputs."""

    def begin_backward(self) -> None:
        """Check that the backward graph may be replayed."""

    def end_backward(self) -> None:
        """Note that the backward graph was replayed."""


def _refuse_second_derivatives(runner: RecordedRunner | ReplayedRunner) -> None:
    if torch.is_grad_enabled():  # autograd records a backward pass with create_graph=True only
        raise RuntimeError(
            f"{runner.name}: create_graph=True asks for second derivatives, which CUDA graphs do not compute. Train "
            "with --cuda-graph-impl none."
        )


class _CudagraphRecordNode(torch.autograd.Function):
    """An identity behind the outputs of a recorded module. Its backward runs when that of a replay would."""

    @staticmethod
    def forward(ctx: Any, runner: RecordedRunner, *inputs: torch.Tensor) -> Any:
        """Return ``inputs``, the outputs of the module that require grad, unchanged.

        Raises:
            RuntimeError: the runner waits for its backward pass.
        """
        runner.expect(_GraphStatus.FWD_READY)
        ctx.runner = runner
        ctx.set_materialize_grads(False)
        outputs = tuple(tensor.detach() for tensor in inputs)
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Record the runner's first backward pass; return ``grads`` unchanged.

        Raises:
            RuntimeError: the runner waits for its forward pass, or second derivatives are wanted.
        """
        _refuse_second_derivatives(ctx.runner)
        ctx.runner.record_backward()
        return None, *grads


class _CudagraphReplayNode(ReplayNode):
    """Replays the graphs of a runner, with autograd.

    What a graph cannot hold happens around it: copies into static tensors, the state of FP8 and FP4, the runner's
    status, and the event after which weight gradients are complete.
    """

    @staticmethod
    def forward(ctx: Any, runner: ReplayedRunner, is_first_microbatch: bool, *inputs: torch.Tensor) -> Any:
        """Replay the forward graph of ``runner``.

        Args:
            ctx: autograd's.
            runner: The ``_CudaGraphRunner``.
            is_first_microbatch: Whether quantized weights are made anew.
            inputs: The tensors among the arguments, then the parameters that get a gradient.

        Raises:
            RuntimeError: the runner has no graph, waits for its backward pass, or would overwrite what others hold.
        """
        ctx.runner = runner
        return ReplayNode.forward(ctx, runner.begin_forward(), runner.replay_options(is_first_microbatch), *inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Replay the backward graph.

        Raises:
            RuntimeError: the runner has no such graph, or waits for its forward pass, or second derivatives are wanted.
        """
        runner = ctx.runner
        _refuse_second_derivatives(runner)
        runner.begin_backward()
        results = ReplayNode.backward(ctx, *grads)
        runner.end_backward()
        return results


def replay_runner(runner: ReplayedRunner, is_first_microbatch: bool, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Replay ``runner`` with autograd; ``inputs`` as for ``_CudagraphReplayNode``."""
    if torch._C._are_functorch_transforms_active():
        return _CudagraphReplayNode.apply(runner, is_first_microbatch, *inputs)  # says what torch says of it
    return _apply(runner, is_first_microbatch, *inputs)


# Function.apply without what it does in Python for torch.func.
_apply = super(torch.autograd.Function, _CudagraphReplayNode).apply


class LocalReplay(Replay):
    """Replays graphs some of whose inputs other graphs read too, or write. Takes the arguments of ``Replay``."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._turns = Turns()
        self._static_inputs: list[tuple[StaticInput, int]] = []
        self._leaves: list[int] = []  # of the last forward pass: inputs whose gradient becomes their grad

    def share(self, turns: Turns, static_inputs: list[tuple[StaticInput, int]]) -> None:
        """Before the first replay, take over what is shared with other graphs.

        Args:
            turns: Which runners are between their forward and backward pass.
            static_inputs: What copies the inputs, each with the runners, a bit each, that hold its value from their
                forward to their backward pass.
        """
        self._turns, self._static_inputs = turns, static_inputs

    def place(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy ``inputs``, which parameters may follow, to where the forward graph reads them.

        Raises:
            RuntimeError: another graph, whose backward pass is still to come, needs what is there.
        """
        in_flight = self._turns.in_flight
        for (static, users), given in zip(self._static_inputs, inputs):  # noqa: B905
            if not static.put(given, bool(in_flight & users)):
                raise RuntimeError(
                    f"{self.name}: at capture an input of shape {tuple(given.shape)} was one tensor for several graphs "
                    "or came straight from another graph, and now it is another tensor. With --cuda-graph-impl local "
                    "every step must pass tensors from layer to layer as the first one did."
                )
        given = inputs[: len(self._static_inputs)]
        self._leaves = [index for index, each in enumerate(given) if each.requires_grad and each.is_leaf]

    def backward(self, grads: Tensors, options: ReplayOptions | None) -> list[torch.Tensor | None]:
        """Copy the outputs' gradients to their static places and run the backward graph.

        Raises:
            RuntimeError: there is no backward graph.
        """
        results = super().backward(grads, options)
        for index in self._leaves:  # the next micro-batch would write into a static one before it is added
            grad = results[index]
            results[index] = grad if grad is None else grad.clone()
        return results

    def reset(self) -> None:
        """Let go of the graphs and of all tensors."""
        super().reset()
        self._static_inputs = []
