"""A function whose whole forward pass is one CUDA graph and whose whole backward pass is another.

Unlike those of ``make_graphed_callables``, the graphs hold all that hooks enqueue, in modules, in autograd and on other
streams: collectives, and what becomes of the gradients of parameters.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

import torch

from . import sanitizer
from .capture import Capture
from .gradient_sink import AroundBackward
from .memory import release_cached_memory
from .preserve import pause_gc, preserve_buffers
from .quantization import RecordedQuantization
from .replay import Replay, ReplayOptions, Tensors, replay
from .rng import preserve_rng
from .streams import capture_stream, refuse_legacy_stream

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


class WholePasses:
    """The two graphs of a function that returns one tensor.

    Args:
        name: What errors and profiles call it.
        inputs: Static inputs, by keyword. Those that require grad must be leaves.
        owner: Manages what the graphs use but do not hold.
        copies_output: Whether a replay returns a copy of the output, which its readers may keep beyond the next replay.
        quantized: How the modules are quantized; None where they are not.
        has_backward: Whether there is a backward pass. Without one all is called without grad.

    Attributes:
        forward_graph: Runs the forward pass; None before capture and after ``reset``.
        backward_graph: Runs the backward pass, if there is one.
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
        self._name, self._has_backward = name, has_backward
        self._inputs = dict(inputs)
        self._replay_type = _FreshOutputs if copies_output else Replay
        self._owner: PassOwner | None = owner
        self._quantized = quantized
        self.forward_graph: torch.cuda.CUDAGraph | None = None
        self.backward_graph: torch.cuda.CUDAGraph | None = None
        self._replay: Replay | None = None
        self._leaf = torch.empty(0, device="cuda", requires_grad=True)  # for its sake autograd runs the backward pass

    def capture(self, func: Callable[..., torch.Tensor], module: torch.nn.Module, num_warmup_iters: int) -> None:
        """Run the passes of ``func`` some times, then record them.

        RNG, buffers and garbage collection are restored. After an exception there are no graphs.

        Args:
            func: Takes the inputs by keyword and returns a tensor, which requires grad if there is a backward pass.
            module: The module whose parameters and buffers it uses.
            num_warmup_iters: How often it runs before.

        Raises:
            RuntimeError: a gradient is accumulated on the legacy default stream, or something cannot be captured.
        """
        params = [param for param in module.parameters() if param.requires_grad]
        try:
            quantized = nullcontext() if self._quantized is None else self._quantized.capturing()
            with pause_gc(), preserve_rng(), preserve_buffers([module]), quantized, capture_stream():
                for _ in range(num_warmup_iters):
                    with refuse_legacy_stream(self._name, params):
                        self._run(func, None)
                release_cached_memory()
                self._run(func, Capture(None))
            if sanitizer.requested():
                self._look_at_memory(module)
        except BaseException:
            self.reset()
            raise

    @contextmanager
    def _running(self, phase: Phase, capture: Capture | None, graph: torch.cuda.CUDAGraph | None) -> Iterator[None]:
        assert self._owner is not None
        recording = nullcontext() if capture is None or graph is None else capture.recording(graph)
        with torch.profiler.record_function(f"{self._name} {phase}"), recording, self._owner.running(phase):
            yield

    def _run(self, func: Callable[..., torch.Tensor], capture: Capture | None) -> None:
        forward_graph, backward_graph = (None, None) if capture is None else (capture.new_graph(), capture.new_graph())
        with self._running("forward", capture, forward_graph):
            output = func(**self._inputs)
        grad = torch.zeros_like(output) if self._has_backward else None
        if grad is None:
            backward_graph = None
        else:
            with self._running("backward", capture, backward_graph):
                torch.autograd.backward(output, grad)
        grad_inputs = tuple(tensor.grad for tensor in self._inputs.values())
        for tensor in self._inputs.values():
            tensor.grad = None
        if capture is None:
            return
        self.forward_graph, self.backward_graph = forward_graph, backward_graph
        self._replay = self._replay_type(
            name=self._name,
            forward_graph=forward_graph,
            backward_graph=backward_graph,
            inputs=tuple(self._inputs.values()),
            outputs=(output.detach(),),
            differentiable=(self._has_backward,),
            grad_outputs=(grad,),
            grad_inputs=grad_inputs,
            grad_params=(None,),
            clone_param_grads=(False,),
            quantized=None,
            around_backward=self._owner,
        )

    def _look_at_memory(self, module: torch.nn.Module) -> None:
        """Let each replay look first at the memory that its graph uses, as far as it is known."""
        assert self._replay is not None and self._owner is not None and self.forward_graph is not None
        tensors = sanitizer.captured_of(module)
        tensors += sanitizer.captured((f"input {name}", tensor) for name, tensor in self._inputs.items())
        tensors += sanitizer.captured(self._owner.captured_tensors())
        self._replay.sanitizer = sanitizer.Sanitizer(self._name, tensors, self.forward_graph.pool())

    def __call__(self, inputs: Iterable[torch.Tensor]) -> torch.Tensor:
        """Replay on ``inputs``, in the order of the static ones, with the same shapes and dtypes.

        Returns a tensor that takes part in autograd.

        Raises:
            RuntimeError: after ``reset``.
        """
        if self._replay is None or self._owner is None:
            raise RuntimeError(f"the graphs of {self._name} were reset; capture them again to replay them")
        self._owner.before_forward()
        if self._quantized is not None:
            self._quantized.before_forward()
        (output,) = replay(self._replay, None, *inputs, self._leaf)
        assert output is not None
        return output

    @property
    def replays(self) -> int:
        """How often the forward graph was replayed; 0 without graphs."""
        return 0 if self._replay is None else self._replay.generation

    def before_eager_forward(self) -> None:
        """To be called right before a forward pass with gradients that runs eagerly though there are graphs."""
        if self._owner is not None:
            self._owner.before_eager_forward()

    def reset(self) -> None:
        """Free the graphs and every tensor they own."""
        for graph in (self.forward_graph, self.backward_graph):
            if graph is not None:
                graph.reset()
        self.forward_graph = self.backward_graph = None
        if self._replay is not None:
            self._replay.reset()
        if self._owner is not None:
            self._owner.forget()
        self._replay = self._owner = self._quantized = None
        self._inputs = {}


class _FreshOutputs(Replay):
    """A replay whose outputs are copies."""

    def forward(self, inputs: Iterable[torch.Tensor], options: ReplayOptions | None) -> Tensors:
        return tuple(output if output is None else output.clone() for output in super().forward(tuple(inputs), options))
