"""Functions whose whole forward pass is one CUDA graph and whose whole backward pass is another.

Unlike those of ``make_graphed_callables``, the graphs hold all that hooks enqueue, in modules, in autograd and on other
streams: collectives, and what becomes of the gradients of parameters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from . import sanitizer
from .capture import Capture, capturing
from .memory import release_cached_memory, weak_reference
from .preserve import preserve_buffers
from .quantization import RecordedQuantization
from .replay import AroundBackward, CapturedGraphs, Replay, ReplayOptions, Tensors, replay
from .streams import make_workspaces, refuse_legacy_stream

Phase = Literal["forward", "backward"]


class PassOwner(AroundBackward, Protocol):
    """Manages resources that the graphs use but do not own."""

    def running(self, phase: Phase) -> AbstractContextManager[None]:
        """Return the context in which a phase is warmed up or recorded. At its end all work has joined its stream."""

    def before_forward(self) -> None:
        """Called right before each replay of the forward graph, on the stream of the forward pass."""

    def before_eager_forward(self) -> None:
        """Called right before a forward pass with gradients that runs eagerly though there are graphs."""

    def captured_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return with their names what tensors the graphs use beside those of the module; called after capture."""

    def forget(self) -> None:
        """Called once there are no graphs any more."""


class WholePasses(CapturedGraphs):
    """The two graphs of a function that returns one tensor.

    Args:
        inputs: Static inputs, by keyword. Those that require grad must be leaves.
        owner: Manages what the graphs use but do not hold.
        copies_output: Whether a replay returns copies of the output, and of the gradients of inputs, which their
            readers may keep beyond the next replay.
        quantized: How the modules are quantized; None where they are not.
        has_backward: Whether there is a backward pass. Without one all is called without grad.

    Attributes:
        quantized: The argument; None after ``reset``.
    """

    def __init__(
        self,
        name: str,
        inputs: Mapping[str, torch.Tensor],
        owner: PassOwner,
        *,
        copies_output: bool = True,
        quantized: RecordedQuantization | None = None,
        has_backward: bool = True,
    ):
        super().__init__(name)
        self.inputs = dict(inputs)
        self._copies_output, self._has_backward = copies_output, has_backward
        self._owner: PassOwner | None = owner
        self.quantized = quantized
        self._edge: GradientEdge | None = None  # where the backward pass begins, once the forward pass has run
        self._leaf = torch.empty(0, device="cuda", requires_grad=True)  # for its sake autograd runs the backward pass

    @contextmanager
    def _running(self, phase: Phase, capture: Capture | None) -> Iterator[torch.cuda.CUDAGraph | None]:
        assert self._owner is not None
        graph = None if capture is None else capture.new_graph()
        recorded = nullcontext() if capture is None or graph is None else capture.recording(graph)
        with torch.profiler.record_function(f"{self.name} {phase}"), recorded, self._owner.running(phase):
            yield graph

    def _run_forward(self, func: Callable[..., torch.Tensor], capture: Capture | None) -> None:
        reading_flag = nullcontext() if self.quantized is None else self.quantized.reading_flag()
        with reading_flag, self._running("forward", capture) as graph:
            output = func(**self.inputs)
        static = output.detach()
        self.outputs = (weak_reference(static) if self._copies_output else static,)  # copied right after each replay
        if capture is not None:
            self.forward_graph = graph
            self.order, self.forward_turn = capture.order, capture.order.number(self.name)
        if self._has_backward:
            self._edge = get_gradient_edge(output)
        elif capture is not None:
            self._make_replay(None)

    def _run_backward(self, grads: dict[tuple, torch.Tensor], capture: Capture | None) -> None:
        """Run the backward pass.

        Args:
            grads: Static gradients of outputs. One serves all passes: each reads it right after it was written.
        """
        edge, (output,) = self._edge, self.outputs
        assert edge is not None and output is not None
        self._edge = None
        key = output.shape, output.stride(), output.dtype
        if key not in grads:
            grads[key] = torch.zeros_like(output)
        with self._running("backward", capture) as graph:
            torch.autograd.backward(edge, grads[key])
        if capture is not None:
            self.backward_graph, self.backward_turn = graph, capture.order.number(self.name)
            self._make_replay(grads[key])
        for tensor in self.inputs.values():
            tensor.grad = None

    def _make_replay(self, grad: torch.Tensor | None) -> None:
        grad_inputs = [tensor.grad for tensor in self.inputs.values()]
        if self._copies_output:
            grad_inputs = [each if each is None else weak_reference(each) for each in grad_inputs]
        self.differentiable, self.grad_outputs = (self._has_backward,), (grad,)
        self.grad_inputs, self.grad_params = tuple(grad_inputs), (None,)
        self._replay = (_Copies if self._copies_output else Replay)(
            self,
            tuple(self.inputs.values()),
            clone_param_grads=(False,),
            around_backward=self._owner,
        )
        self.drop_results()

    def _look_at_memory(self, module: torch.nn.Module) -> None:
        """Let each replay look first at the memory that its graph uses, as far as it is known."""
        assert self._replay is not None and self._owner is not None and self.forward_graph is not None
        tensors = sanitizer.captured_of(module)
        tensors += sanitizer.captured((f"input {name}", tensor) for name, tensor in self.inputs.items())
        tensors += sanitizer.captured(self._owner.captured_tensors())
        self._replay.sanitizer = sanitizer.Sanitizer(self.name, tensors, self.forward_graph.pool())

    def __call__(self, inputs: Iterable[torch.Tensor]) -> torch.Tensor:
        """Replay on ``inputs``, in the order of the static ones, with the same shapes and dtypes.

        Returns a tensor that takes part in autograd.

        Raises:
            RuntimeError: after ``reset``.
        """
        if self._replay is None or self._owner is None:
            raise RuntimeError(f"the graphs of {self.name} were reset; capture them again to replay them")
        self._owner.before_forward()
        if self.quantized is not None:
            self.quantized.before_forward()
        (output,) = replay(self._replay, None, *inputs, self._leaf)
        assert output is not None
        return output

    def before_eager_forward(self) -> None:
        if self._owner is not None:
            self._owner.before_eager_forward()

    def reset(self) -> None:
        super().reset()
        if self._owner is not None:
            self._owner.forget()
        self._owner = self._edge = self.quantized = None
        self.inputs = {}


class _Copies(Replay):
    """A replay whose outputs, and gradients of inputs, are copies."""

    def forward(self, inputs: Sequence[torch.Tensor], options: ReplayOptions | None) -> Tensors:
        outputs = super().forward(inputs, options)
        self.leaves = self.with_grad
        return tuple(output if output is None else output.clone() for output in outputs)


def capture_passes(
    turns: Iterable[tuple[WholePasses, Callable[..., torch.Tensor] | None]],
    modules: Mapping[WholePasses, torch.nn.Module],
    num_warmup_iters: int,
) -> None:
    """Run passes some times, then record them, in the order in which they will be replayed.

    RNG, buffers and garbage collection are restored. After an exception there are no graphs.

    Args:
        turns: The passes in order: with a function, which takes the inputs by keyword and returns a tensor that
            requires grad, its forward pass; with None the backward pass.
        modules: The module whose parameters and buffers the function uses.
        num_warmup_iters: How often all of them run before.

    Raises:
        RuntimeError: a gradient is accumulated on the legacy default stream, or something cannot be captured.
    """
    turns = list(turns)
    distinct = list(dict.fromkeys(modules.values()))
    params = [param for module in distinct for param in module.parameters() if param.requires_grad]

    def run(capture: Capture | None) -> None:
        grads: dict[tuple, torch.Tensor] = {}
        for passes, func in turns:
            if func is None:
                passes._run_backward(grads, capture)
            else:
                passes._run_forward(func, capture)

    try:
        quantized = dict.fromkeys(passes.quantized for passes in modules if passes.quantized is not None)
        with capturing(preserve_buffers(distinct), *(each.capturing() for each in quantized)):
            if not num_warmup_iters:
                make_workspaces()
            for _ in range(num_warmup_iters):
                with refuse_legacy_stream(turns[0][0].name, params):
                    run(None)
            release_cached_memory()
            run(Capture(None))
        for passes, module in modules.items() if sanitizer.requested() else ():
            passes._look_at_memory(module)
    except BaseException:
        for passes in modules:
            passes.reset()
        raise
