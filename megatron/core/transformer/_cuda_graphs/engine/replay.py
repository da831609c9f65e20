"""Replays of captured graphs with autograd. Every microsecond here is paid by each layer in each step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from .sanitizer import Sanitizer

Tensors = tuple[torch.Tensor | None, ...]


class AroundBackward(Protocol):
    """What runs around the replays of a backward graph."""

    def before_backward(self) -> None:
        """Called right before each replay of the backward graph, on the stream of the backward pass."""

    def after_backward(self) -> None:
        """Called right after each replay of the backward graph, on the stream of the backward pass."""


class ReplayOrder:
    """The order in which the passes of one capture were recorded, and how far its replays are in it.

    Graphs of a capture share memory: one may use what those captured before it have freed. So it may overwrite what
    passes keep that were captured later, and only replays that come in the order of capture leave each other's alone.
    Any may be left out. A replay whose number is not higher than the last one's begins a new *round*, and what passes
    of former rounds have kept is lost. ``Replay`` counts rounds itself, without a call.

    Attributes:
        began: The number of the replay that began the round.
    """

    __slots__ = ("_names", "began", "last", "round")

    def __init__(self) -> None:
        self.last = -1
        self.round = 0
        self.began = -1
        self._names: list[str] = []

    def number(self, name: str) -> int:
        """Return the next number, that of a pass of the callable ``name``."""
        self._names.append(name)
        return len(self._names) - 1

    def rename(self, number: int, name: str) -> None:
        """Let errors call the callable of a pass ``name``."""
        self._names[number] = name

    def name_of(self, number: int) -> str:
        """Return what errors call the callable of a pass."""
        return self._names[number]

    def refuse(self, number: int) -> NoReturn:
        """Raise the error about a backward pass whose forward pass was of a former round, or that would begin one.

        Raises:
            RuntimeError: names the callable that was replayed instead.
        """
        other = self.name_of(self.last if number <= self.last else self.began)
        name = self.name_of(number)
        raise RuntimeError(
            f"{name}: backward of a replay whose activations a later replay has overwritten, that of {other}. A graph "
            "serves one forward pass at a time, and one backward pass of it; graphs that are captured together share "
            "memory, and are replayed in the order of capture, where any may be left out. Call layers in that order; "
            "run backward before the next forward, and once (or capture with retain_graph_in_backward=True); or "
            "capture the callable once for each call, with _order and an entry of sample_args for each."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How one call is replayed, where it is not on the current stream and alone.

    Attributes:
        stream: The stream to replay on; None for the current one.
        event: What the current stream waits for instead of all of ``stream``; recorded in the graph.
        after_backward: Called right after the backward replay; None for nothing.
    """

    stream: torch.cuda.Stream | None = None
    event: torch.cuda.Event | None = None
    after_backward: Callable[[], None] | None = None


class CapturedGraphs:
    """A forward and a backward graph with the static tensors around them.

    Attributes:
        name: What errors and profiles call the callable.
        forward_graph: Runs the forward pass; None before capture and after ``reset``.
        backward_graph: Runs the backward pass; None where nothing requires grad.
        outputs: The static outputs, flattened.
        differentiable: For each output whether it takes part in autograd.
        grad_outputs: The static gradients of the outputs; None for an output that takes no part in autograd.
        grad_inputs: The static gradients of the inputs; None for an input that gets none.
        grad_params: The static gradients of parameters; None for what backward returns no gradient of.
        order: In what order graphs of the capture are replayed.
        forward_turn: The number in ``order`` of the forward pass.
        backward_turn: That of the backward pass; None if it leaves all memory as it was.
    """

    def __init__(self, name: str):
        self.name = name
        self.forward_graph: torch.cuda.CUDAGraph | None = None
        self.backward_graph: torch.cuda.CUDAGraph | None = None
        self.outputs: Tensors = ()
        self.differentiable: tuple[bool, ...] = ()
        self.grad_outputs: Tensors = ()
        self.grad_inputs: Tensors = ()
        self.grad_params: Tensors = ()
        self.order = ReplayOrder()
        self.forward_turn = self.order.number(name)
        self.backward_turn: int | None = None
        self._replay: Replay | None = None

    @property
    def replays(self) -> int:
        """How often the forward graph was replayed; 0 without graphs."""
        return 0 if self._replay is None else self._replay.generation

    def drop_results(self) -> None:
        """Let go of what passes computed."""
        self.outputs = self.grad_outputs = self.grad_inputs = self.grad_params = ()

    def reset(self) -> None:
        """Free the graphs and every tensor they own. They can no longer be replayed."""
        for graph in (self.forward_graph, self.backward_graph):
            if graph is not None:
                graph.reset()
        self.forward_graph = self.backward_graph = None
        self.drop_results()
        if self._replay is not None:
            self._replay.reset()
            self._replay = None


class Replay:
    """Replays graphs, and copies what they read and return.

    Args:
        captured: The graphs.
        inputs: The static inputs.
        clone_param_grads: For each of the gradients of parameters whether it is returned as a copy.
        around_backward: What runs around the replays of the backward graph.

    Attributes:
        generation: How often the forward graph was replayed.
        round: That of ``order`` in which the last forward replay was.
        with_grad: The indices of the inputs that have a gradient.
        leaves: Those of them in the last replay whose gradient becomes their ``grad``.
        sanitizer: Checks memory before each replay; usually None.
    """

    def __init__(
        self,
        captured: CapturedGraphs,
        inputs: Sequence[torch.Tensor],
        *,
        clone_param_grads: Sequence[bool],
        around_backward: AroundBackward | None,
    ):
        self.name = captured.name
        self._forward_graph, self._backward_graph = captured.forward_graph, captured.backward_graph
        self._inputs = [(tensor, tensor.data_ptr(), tensor.stride()) for tensor in inputs]
        self._num_inputs = len(inputs)
        self._outputs = captured.outputs
        self.not_differentiable = [
            i
            for i, (output, takes_part) in enumerate(zip(captured.outputs, captured.differentiable, strict=True))
            if output is not None and not takes_part
        ]
        self._grad_outputs = [
            (grad, 0, ()) if grad is None else (grad, grad.data_ptr(), grad.stride()) for grad in captured.grad_outputs
        ]
        self._grad_inputs = captured.grad_inputs
        self.with_grad = [index for index, grad in enumerate(captured.grad_inputs) if grad is not None]
        self._grad_params = list(zip(captured.grad_params, clone_param_grads, strict=True))
        self._around_backward = around_backward
        self._order = captured.order
        self._forward_turn, self._backward_turn = captured.forward_turn, captured.backward_turn
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
            RuntimeError: there is no backward graph, or a later replay has overwritten what it reads; or not all
                gradients were asked for, and the graph would add those of its parameters to the training's.
        """
        if self._backward_graph is None:
            raise RuntimeError(f"{self.name} has no backward graph: it was captured without grad, or reset")
        order, turn = self._order, self._backward_turn
        if turn is None:
            turn = order.last
        elif turn <= order.last:
            order.refuse(turn)
        if replayed_in != order.round:
            order.refuse(turn)
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
                _refuse_some_gradients(order.name_of(turn))
            around.before_backward()
        self.run(self._backward_graph, "backward", options)
        if around is not None:
            around.after_backward()
        if options is not None and options.after_backward is not None:
            options.after_backward()
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
        self._forward_graph = self._backward_graph = self._around_backward = self.sanitizer = None
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
    """Replays with autograd."""

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
