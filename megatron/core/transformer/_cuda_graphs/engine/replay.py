"""Replays of captured graphs with autograd. Every microsecond here is paid by each layer in each step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from .gradient_sink import AroundBackward
from .quantization import QuantizedReplay
from .replay_order import ReplayOrder
from .sanitizer import Sanitizer

Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How one call is replayed, where it is not on the current stream and alone.

    Attributes:
        stream: The stream to replay on; None for the current one.
        event: What the current stream waits for instead of all of ``stream``; recorded in the graph.
        ends_quantization: Whether the backward replay is followed by ``QuantizedReplay.after_backward``.
    """

    stream: torch.cuda.Stream | None = None
    event: torch.cuda.Event | None = None
    ends_quantization: bool = False


class Replay:
    """A forward and a backward graph with the static tensors around them.

    Args:
        forward_graph, backward_graph: The graphs; the latter None where nothing requires grad.
        differentiable: For each output whether it takes part in autograd.
        grad_outputs: Static gradients of outputs; None where an output is not differentiable.
        grad_inputs: Static gradients of inputs; None where an input requires none.
        grad_params: Static gradients of parameters; None for what backward returns no gradient of.
        clone_param_grads: For each of these whether it is returned as a copy.
        around_backward: What runs around the replays of the backward graph.
        order: In what order graphs of the capture are replayed; None for graphs that share no memory with others.
        turns: The numbers in ``order`` of forward and backward; None for one that leaves all memory as it was.

    Attributes:
        generation: How often the forward graph was replayed.
        round: That of ``order`` in which the last forward replay was.
        with_grad: The indices of the inputs that have a gradient.
        leaves: Those of them in the last replay whose gradient becomes their ``grad``.
        sanitizer: Checks memory before each replay; usually None.
    """

    def __init__(
        self,
        *,
        name: str,
        forward_graph: torch.cuda.CUDAGraph | None,
        backward_graph: torch.cuda.CUDAGraph | None,
        inputs: Sequence[torch.Tensor],
        outputs: Tensors,
        differentiable: Sequence[bool],
        grad_outputs: Tensors,
        grad_inputs: Tensors,
        grad_params: Tensors,
        clone_param_grads: Sequence[bool],
        quantized: QuantizedReplay | None,
        around_backward: AroundBackward | None = None,
        order: ReplayOrder | None = None,
        turns: tuple[int, int | None] = (0, 1),
    ):
        self.name = name
        self._forward_graph, self._backward_graph = forward_graph, backward_graph
        self._inputs = [(tensor, tensor.data_ptr(), tensor.stride()) for tensor in inputs]
        self._num_inputs = len(inputs)
        self._outputs = outputs
        self.not_differentiable = [
            i
            for i, (output, takes_part) in enumerate(zip(outputs, differentiable, strict=True))
            if output is not None and not takes_part
        ]
        self._grad_outputs = [
            (grad, 0, ()) if grad is None else (grad, grad.data_ptr(), grad.stride()) for grad in grad_outputs
        ]
        self._grad_inputs = grad_inputs
        self.with_grad = [index for index, grad in enumerate(grad_inputs) if grad is not None]
        self._grad_params = list(zip(grad_params, clone_param_grads, strict=True))
        self._quantized = quantized
        self._around_backward = around_backward
        self._order = ReplayOrder() if order is None else order
        self._forward_turn, self._backward_turn = turns
        self.generation = self.round = 0
        self.leaves: list[int] = []
        self.sanitizer: Sanitizer | None = None

    def forward(self, inputs: Sequence[torch.Tensor], options: ReplayOptions | None) -> Tensors:
        """Copy ``inputs`` to their static places and run the forward graph. Further ``inputs`` are parameters."""
        given = inputs[: self._num_inputs]
        self.place(given)
        self.leaves = [index for index in self.with_grad if given[index].is_leaf and given[index].requires_grad]
        self.generation += 1
        order, turn = self._order, self._forward_turn
        if turn <= order.last:
            order.round += 1
            order.began = turn
        order.last = turn
        self.round = order.round
        self.run(self._forward_graph, "forward", options)
        return tuple([output if output is None else output.detach() for output in self._outputs])

    def place(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy ``inputs`` to where the forward graph reads them."""
        for (static, address, stride), given in zip(self._inputs, inputs):  # noqa: B905
            if given.data_ptr() != address:
                static.copy_(given)
            elif given is not static and (given.stride() != stride or _differ_in_bits(given, static)):
                static.copy_(given.clone())

    def backward(
        self, grads: Tensors, options: ReplayOptions | None, replayed_in: int, node: Any
    ) -> list[torch.Tensor | None]:
        """Copy the outputs' gradients to their static places and run the backward graph.

        Args:
            grads: The gradients of the outputs; None for zeros.
            replayed_in: ``round`` right after the forward replay.
            node: Autograd's node of the replay. Where something runs around it the last input, if it requires grad, is
                a leaf that is in every backward pass.

        Raises:
            RuntimeError: there is no backward graph, or the forward graph was replayed again since: backward would
                compute gradients from the activations of that replay. Or not all gradients were asked for, and the
                graph would add those of its parameters to the training's.
        """
        if self._backward_graph is None:
            raise RuntimeError(f"{self.name} has no backward graph: it was captured without grad, or reset")
        order, turn = self._order, self._backward_turn
        if turn is None:
            turn = order.last
        elif turn <= order.last:
            order.refuse(turn, self.name)
        if replayed_in != order.round:
            order.refuse(turn, self.name)
        order.last = turn
        for (static, address, stride), given in zip(self._grad_outputs, grads):  # noqa: B905
            if static is None:
                continue
            if given is None:
                static.zero_()
            elif given.data_ptr() != address:
                static.copy_(given)
            elif given.stride() != stride or _differ_in_bits(given, static):
                static.copy_(given.clone())
        around = self._around_backward
        if around is not None:
            leaf, _ = node.next_functions[-1]
            if leaf is not None and not torch._C._will_engine_execute_node(leaf):
                _refuse_some_gradients(order.name_of(turn, self.name))
            around.before_backward()
        self.run(self._backward_graph, "backward", options)
        if around is not None:
            around.after_backward()
        if options is not None and options.ends_quantization and self._quantized is not None:
            self._quantized.after_backward()
        # Autograd may keep or accumulate into what it is given: new tensors. `data` makes them at half of the cost of
        # `detach`; what it leaves out, a version shared with the static tensor, nothing reads.
        results = [grad if grad is None else grad.data for grad in self._grad_inputs]
        for index in self.leaves:  # autograd keeps what it is given as their grad; the next replay would overwrite it
            results[index] = results[index].clone()  # type: ignore[union-attr]
        results += [grad if grad is None else grad.clone() if clone else grad.data for grad, clone in self._grad_params]
        return results

    def run(self, graph: Any, phase: str, options: ReplayOptions | None) -> None:
        """Replay ``graph``, which shows in a profile as this phase of the callable."""
        if self.sanitizer is not None:
            self.sanitizer.check(phase)
        if not torch.autograd._profiler_enabled():
            if options is None:
                graph.replay()
            else:
                _run(graph, options)
            return
        with torch.profiler.record_function(f"{self.name} {phase} replay"):
            _run(graph, options)

    def reset(self) -> None:
        """Let go of the graphs and of all tensors."""
        self._forward_graph = self._backward_graph = self._quantized = self._around_backward = self.sanitizer = None
        self._inputs, self._grad_outputs, self._grad_params = [], [], []
        self._outputs = self._grad_inputs = ()


def _refuse_some_gradients(name: str) -> NoReturn:
    raise RuntimeError(
        f"{name}: torch.autograd.grad, or backward(inputs=...), asks for some gradients only, and a replay adds those "
        "of all its parameters to the training's. Call backward() of the whole loss, or train without graphs "
        "(--cuda-graph-impl none)"
    )


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
        outputs = replay.forward(inputs, options)
        ctx.replayed = replay, options, replay.round
        ctx.materialize_grads = False
        if replay.not_differentiable:
            ctx.mark_non_differentiable(*(outputs[i] for i in replay.not_differentiable))
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():  # create_graph=True
            return None, None, *_without_second_derivatives(ctx, grads)
        replay, options, round_ = ctx.replayed
        return None, None, *replay.backward(grads, options, round_, ctx)


def _without_second_derivatives(ctx: Any, grads: Tensors) -> list[torch.Tensor | None]:
    """Run the backward replay; what it returns raises an error if it is differentiated.

    torch's ``once_differentiable`` does so only where ``grads`` require grad, though a gradient also depends on the
    inputs and parameters of the forward pass.
    """
    replay, options, round_ = ctx.replayed
    with torch.no_grad():
        results = replay.backward(grads, options, round_, ctx)
    message = f"{replay.name}: CUDA graphs compute first derivatives only; run it eagerly for second ones"
    return [
        grad if grad is None else torch._C._functions.DelayedError(message.encode(), 1)(grad.detach().requires_grad_())
        for grad in results
    ]


def fast_apply(node: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``node.apply`` without what it does in Python for torch.func, which costs more than the rest of it."""
    apply = super(torch.autograd.Function, node).apply

    def applied(*arguments: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return node.apply(*arguments)  # raises torch's own error about such functions
        return apply(*arguments)

    return applied


# Replays graphs with autograd: a Replay, its options, the inputs of the callable, then its parameters.
replay: Callable[..., Tensors] = fast_apply(ReplayNode)
