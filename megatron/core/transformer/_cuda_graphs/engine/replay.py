"""Replays of captured graphs with autograd. Every microsecond here is paid by each layer in each step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .quantization import QuantizedReplay

Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How one call is replayed, where it is not on the current stream and alone.

    Attributes:
        stream: The stream to replay on; None for the current one.
        event: What the current stream waits for instead of all of ``stream``; recorded in the graph.
        ends_quantization: Whether the backward replay is followed by ``QuantizedReplay.after_backward``.
    """

    stream: torch.cuda.Stream | None
    event: torch.cuda.Event | None
    ends_quantization: bool


class Replay:
    """A forward and a backward graph with the static tensors around them.

    Args:
        name: What profiles and errors call it.
        forward_graph, backward_graph: The graphs; the latter None where nothing requires grad.
        inputs: Static inputs.
        outputs: Static outputs.
        differentiable: For each output whether it takes part in autograd.
        grad_outputs: Static gradients of outputs; None where an output is not differentiable.
        grad_inputs: Static gradients of inputs; None where an input requires none.
        grad_params: Static gradients of parameters; None for what backward returns no gradient of.
        clone_param_grads: Whether these are returned as copies.
        quantized: What is done for quantization.
    """

    def __init__(
        self,
        name: str,
        forward_graph: torch.cuda.CUDAGraph | None,
        backward_graph: torch.cuda.CUDAGraph | None,
        inputs: Sequence[torch.Tensor],
        outputs: Tensors,
        differentiable: Sequence[bool],
        grad_outputs: Tensors,
        grad_inputs: Tensors,
        grad_params: Tensors,
        clone_param_grads: bool,
        quantized: QuantizedReplay | None,
    ):
        self.name = name
        self._forward_graph, self._backward_graph = forward_graph, backward_graph
        self._inputs = [(tensor, tensor.data_ptr(), tensor.stride()) for tensor in inputs]
        self._outputs = outputs
        self.not_differentiable = [
            i
            for i, (output, takes_part) in enumerate(zip(outputs, differentiable, strict=True))
            if output is not None and not takes_part
        ]
        self._grad_outputs = [
            (grad, 0, ()) if grad is None else (grad, grad.data_ptr(), grad.stride()) for grad in grad_outputs
        ]
        self._grad_inputs, self._grad_params = grad_inputs, grad_params
        self._clone_param_grads = clone_param_grads
        self._quantized = quantized

    def forward(self, inputs: Sequence[torch.Tensor], options: ReplayOptions | None) -> Tensors:
        """Copy ``inputs`` to their static places and run the forward graph. Further ``inputs`` are parameters."""
        self.place(inputs)
        self.run(self._forward_graph, "forward", options)
        return tuple([output if output is None else output.detach() for output in self._outputs])

    def place(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy ``inputs``, which parameters may follow, to where the forward graph reads them."""
        for (static, address, stride), given in zip(self._inputs, inputs):  # noqa: B905
            if given.data_ptr() != address:
                static.copy_(given)
            elif given.stride() != stride or _differ_in_bits(given, static):
                static.copy_(given.clone())

    def backward(self, grads: Tensors, options: ReplayOptions | None) -> list[torch.Tensor | None]:
        """Copy the outputs' gradients to their static places and run the backward graph.

        Raises:
            RuntimeError: there is no backward graph.
        """
        if self._backward_graph is None:
            raise RuntimeError(f"{self.name} has no backward graph: it was captured without grad, or reset")
        for (static, address, stride), given in zip(self._grad_outputs, grads):  # noqa: B905
            if static is None:
                continue
            if given is None:
                static.zero_()
            elif given.data_ptr() != address:
                static.copy_(given)
            elif given.stride() != stride or _differ_in_bits(given, static):
                static.copy_(given.clone())
        self.run(self._backward_graph, "backward", options)
        if options is not None and options.ends_quantization and self._quantized is not None:
            self._quantized.after_backward()
        results = [grad if grad is None else grad.detach() for grad in self._grad_inputs]
        if self._clone_param_grads:
            results += [grad if grad is None else grad.clone() for grad in self._grad_params]
        else:
            results += [grad if grad is None else grad.detach() for grad in self._grad_params]
        return results

    def run(self, graph: Any, phase: str, options: ReplayOptions | None) -> None:
        """Replay ``graph``, which shows in a profile as this phase of the callable."""
        if not torch.autograd._profiler_enabled():
            _run(graph, options)
            return
        with torch.profiler.record_function(f"{self.name} {phase} replay"):
            _run(graph, options)

    def reset(self) -> None:
        """Let go of the graphs and of all tensors."""
        self._forward_graph = self._backward_graph = self._quantized = None
        self._inputs, self._grad_outputs = [], []
        self._outputs = self._grad_inputs = self._grad_params = ()


def _differ_in_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one is the conjugate, or the negative, of the other's memory."""
    return one.is_conj() != other.is_conj() or one.is_neg() != other.is_neg()


def _run(graph: Any, options: ReplayOptions | None) -> None:
    if options is None or options.stream is None:
        graph.replay()
        return
    stream, current = options.stream, torch.cuda.current_stream()
    if stream == current:
        graph.replay()
        return
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        graph.replay()
    if options.event is None:
        current.wait_stream(stream)
    else:
        current.wait_event(options.event)


class ReplayNode(torch.autograd.Function):
    """Replays with autograd: its backward replays the backward graph."""

    @staticmethod
    def forward(ctx, replay, options, *inputs):
        ctx.replay, ctx.options = replay, options
        ctx.set_materialize_grads(False)
        outputs = replay.forward(inputs, options)
        if replay.not_differentiable:
            ctx.mark_non_differentiable(*(outputs[i] for i in replay.not_differentiable))
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():  # create_graph=True
            return _refusing_second_derivatives(ctx, *grads)
        return None, None, *ctx.replay.backward(grads, ctx.options)


@once_differentiable
def _refusing_second_derivatives(ctx, *grads):
    return None, None, *ctx.replay.backward(grads, ctx.options)


# Function.apply without what it does in Python for torch.func, which costs more than all the rest of it.
_apply = super(torch.autograd.Function, ReplayNode).apply


def replay(graphs: Replay, options: ReplayOptions | None, *inputs: torch.Tensor) -> Tensors:
    """Replay ``graphs`` with autograd; ``inputs`` are those of the callable, then its parameters."""
    if torch._C._are_functorch_transforms_active():
        return ReplayNode.apply(graphs, options, *inputs)  # says what torch says of such functions
    return _apply(graphs, options, *inputs)
