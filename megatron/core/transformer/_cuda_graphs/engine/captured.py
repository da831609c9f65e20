"""A callable whose passes are CUDA graphs, and the loop that captures several of them in the order of their replays."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import itemgetter
from types import MethodType
from typing import Any, Literal, NoReturn

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_structure, tree_unflatten

from ..replacements import TakenForward
from ..snapshot import Aspect, InputSignature, Snapshot, identities, named, replays
from .capture_time_hooks import CaptureTimeHooks
from .graph import (
    Capture,
    ReplayOrder,
    allow_nested_backward,
    capturing,
    connected_leaves,
    hide_grads_and_hooks,
    make_workspaces,
    preserve_buffers,
    rebind_buffers,
    refuse_legacy_stream,
)
from .memory import PoolMemory, release_cached_memory, storage_address, weak_reference
from .plan import BufferPool, Lease, Pass, Plan
from .quantization import QuantizedReplay, RecordedQuantization

Phase = Literal["forward", "backward"]
Tensors = tuple[torch.Tensor | None, ...]
Grads = Sequence[torch.Tensor | None]

_PARAMETERS = "copy new values into parameters (load_state_dict does), or reset() the graphs and capture again"


class GraphOwner:
    """Owns the resources that a callable's graphs use. The methods of this base class do nothing.

    Attributes:
        notifies_autograd: Whether autograd runs the AccumulateGrad hooks of parameters whose gradients ``take`` took,
            without a gradient. An attribute of the class.
    """

    notifies_autograd = False

    def running(self, phase: Phase) -> AbstractContextManager[None]:
        """Return the context in which a phase is warmed up or recorded; at its end all work has joined the stream."""
        return nullcontext()

    def take(self, params: Sequence[torch.Tensor], grads: Grads) -> Grads:
        """Consume parameter gradients inside the backward graph. The operations run here are recorded and replayed.

        Args:
            params: The parameters that require grad.
            grads: Their gradients; None for a parameter that the callable does not use.

        Returns:
            ``grads`` with None in place of each gradient that was taken; the others go to autograd.
        """
        return grads

    def before_forward(self) -> None:
        """Called right before each replay of the forward graph, on the stream of the forward pass."""

    def before_eager_forward(self) -> None:
        """Called by users of graphs right before a forward pass with grad that runs eagerly instead."""

    def before_backward(self) -> None:
        """Called right before each replay of the backward graph, on the stream of the backward pass."""

    def after_backward(self) -> None:
        """Called right after each replay of the backward graph, on the stream of the backward pass."""

    def forget(self) -> None:
        """Called once, after the graphs were freed."""


@dataclass
class WarmupRecord:
    """Facts about a function that its first passes established. Callables for its other micro-batches may share it.

    Attributes:
        ran: The modules that ran in the first forward pass; None before it.
        backward_ran: Whether a backward pass ran, on a stream that can be captured.
    """

    ran: tuple[torch.nn.Module, ...] | None = None
    backward_ran: bool = False


@dataclass(frozen=True, slots=True)
class _ReplayOptions:
    """Options of one replay that needs more than a launch on the current stream.

    Attributes:
        stream: The stream to replay on; None for the current one.
        event: What the current stream waits for instead of all of ``stream``; recorded in the graph.
        after_backward: Called right after the backward replay; None for nothing.
    """

    stream: torch.cuda.Stream | None
    event: torch.cuda.Event | None
    after_backward: Callable[[], None] | None


class GraphedCallable:
    """A callable for one micro-batch: its forward and backward graph with the static tensors around them.

    ``capture_passes`` captures it. Calls then take tensors of the captured shapes and dtypes, and are differentiable.
    Outputs live in the graphs' memory until the next replay of a graph that shares it. Changing an output in place may
    change the gradients, which autograd does not detect. Inputs may live in the graphs' memory, but must not swap
    places.

    Args:
        name: What errors and profiles call it.
        args, kwargs: Static inputs; nested structures of tensors.
        module: The module whose parameters and submodules ``func`` uses; by default ``module_of(func)``.
        owner: Owns the resources that the graphs use; None if there are none.
        quantized: Runs the part of quantization that replays leave to the host; None without quantization.
        context: Makes the context in which ``func`` runs in warm-up and capture.
        hooks: What runs around passes in warm-up and capture, outside the graphs.
        holds_hooks: Whether hooks of modules and parameters are recorded in the graphs, with the collectives and
            gradient accumulation that they enqueue. Inputs that require grad must then be leaves. Otherwise parameter
            hooks run at each replay, on the gradients that it returns.
        copies_results: Whether a replay returns copies of outputs and input gradients, which stay valid after the next
            replay.
        allow_unused_input: Whether an input that requires grad may get none.
        retain_graph: Whether backward keeps autograd's graph.
        clone_param_grads: Whether backward returns copies of parameter gradients rather than the static ones. Those of
            parameters with ``skip_backward_post_hook`` it never copies.
        warmup: Facts from earlier passes of the same function.

    Attributes:
        eager: The function, or the module's ``forward``, which runs without graphs.
        inputs: The static inputs, flattened.
        outputs: The static outputs, flattened.
        differentiable: For each output whether it takes part in autograd.
        grad_outputs: The static gradients of the outputs; None for an output that takes no part in autograd.
        grad_inputs: The static gradients of the inputs; None for an input that gets none.
        params: The parameters that are inputs of the autograd node.
        grad_params: Their static gradients; None for no gradient.
        forward_graph: None before capture and after ``reset``.
        backward_graph: None where nothing requires grad.
        weight_gradient_graph: Computes the weight gradients that backward delays; None where it delays none.
        order: The order of replays, with the numbers of both passes: ``forward_turn`` and ``backward_turn``, which is
            None if the pass leaves all memory as it was.
        replays: How often the forward graph was replayed.
        round: That of ``order`` in which the last forward replay was.
    """

    def __init__(
        self,
        name: str,
        func: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        module: torch.nn.Module | None = None,
        owner: GraphOwner | None = None,
        quantized: QuantizedReplay | RecordedQuantization | None = None,
        context: Callable[[], AbstractContextManager] = nullcontext,
        hooks: CaptureTimeHooks | None = None,
        holds_hooks: bool = False,
        copies_results: bool = False,
        allow_unused_input: bool = False,
        retain_graph: bool = False,
        clone_param_grads: bool = True,
        warmup: WarmupRecord | None = None,
    ):
        self.name, self.func, self.args, self.kwargs = name, func, args, kwargs
        self.eager = func.forward if isinstance(func, torch.nn.Module) else func
        self.inputs, self._structure = _flat_inputs(name, args, kwargs)
        self._expected = InputSignature(name, self.inputs, "input {}".format)
        self.module = module_of(func) if module is None else module
        self._training = getattr(func, "training", None)
        # Where graphs hold hooks, parameters may be others at capture than now, and no gradient of them is returned.
        known = () if self.module is None or holds_hooks else tuple(self.module.parameters())
        self._all_params: tuple[torch.Tensor, ...] = known
        self.params = tuple(param for param in known if param.requires_grad)
        self._frozen = tuple(param for param in known if not param.requires_grad)
        self._snapshot = self._compare([]) if self._frozen else None
        self.owner, self.quantized, self._context = owner, quantized, context
        self._hooks = hooks or CaptureTimeHooks(name, None)
        self._holds_hooks, self._copies_results = holds_hooks, copies_results
        self._allow_unused_input, self._retain_graph = allow_unused_input, retain_graph
        self._clone_param_grads = clone_param_grads
        self._warmup = warmup or WarmupRecord()
        self._delayed = DelayedWeightGradients((), ())
        if self._warmup.ran is not None:
            self._look_for_delays_and_statistics(self._warmup.ran)

        self.forward_graph: torch.cuda.CUDAGraph | None = None
        self.backward_graph: torch.cuda.CUDAGraph | None = None
        self.weight_gradient_graph: torch.cuda.CUDAGraph | None = None
        self._memory: PoolMemory | None = None
        self.roots: Sequence[torch.Tensor | GradientEdge] = ()  # where the backward pass begins
        self.outputs: Tensors = ()
        self.differentiable: tuple[bool, ...] = ()
        self.grad_outputs: Tensors = ()
        self.grad_inputs: Tensors = ()
        self.grad_params: Tensors = ()
        self._nest: Callable[[Tensors], Any] = tuple  # makes of flattened outputs what ``func`` returned
        self.order = ReplayOrder()
        self.forward_turn = self.order.number(name)
        self.backward_turn: int | None = None

        # Of replays; see ``finish``.
        self.is_ready = False
        self.replays = self.round = 0
        self.not_differentiable: list[int] = []
        self._places: list[tuple[torch.Tensor, int, tuple[int, ...]]] = []
        self._grad_places: list[tuple[torch.Tensor | None, int, tuple[int, ...]]] = []
        self._with_grad: list[int] = []  # the inputs that have a gradient
        self._copied: list[int] = []  # those of them whose gradient the last replay will return as a copy
        self._grads_of_params: list[tuple[torch.Tensor | None, bool]] = []
        self._has_leaf = self._ran_eagerly = False
        self._before_forward: Callable[[], None] | None = None
        self._taken: TakenForward | None = None

    # ------------------------------------------------------------------------------------------- warm-up and capture

    def forward(self, capture: Capture | None) -> None:
        """Run the forward pass on the static inputs, hooks around it.

        Args:
            capture: Records the pass; None for warm-up.
        """
        graph = None if capture is None else capture.new_graph()
        self._hooks.run("forward_pre_hooks", self.func, self.args, self.kwargs)
        with self._noting_modules_that_run(), self._running("forward", capture, graph), self._context():
            output = self.func(*self.args, **self.kwargs)
        self._hooks.run("forward_hooks", self.func, self.args, output)
        outputs, spec = tree_flatten(output)
        if isinstance(output, torch.Tensor):
            self._nest = itemgetter(0)
        else:
            is_tuple = spec == tree_structure(tuple(outputs))
            self._nest = tuple if is_tuple else partial(tree_unflatten, treespec=spec)
        for leaf in outputs:
            if leaf is not None and not isinstance(leaf, torch.Tensor):
                raise TypeError(f"{self.name} returned {leaf!r}, which is neither a tensor nor None")
        with_grad = (
            torch.is_grad_enabled()
        )  # without, an output may still require grad: megatron-core sets it in stages
        self.differentiable = tuple(leaf is not None and with_grad and leaf.requires_grad for leaf in outputs)
        self.roots = list(compress(outputs, self.differentiable))
        if self._holds_hooks:  # an edge does not keep the memory of an output
            self.roots = list(map(get_gradient_edge, self.roots))
        self.outputs = tuple(leaf if leaf is None else leaf.detach() for leaf in outputs)
        self.forward_graph = graph
        if self._copies_results:
            self.outputs = self._weak(self.outputs)
        if capture is not None:
            self.order, self.forward_turn = capture.order, capture.order.number(self.name)

    @contextmanager
    def _running(self, phase: Phase, capture: Capture | None, graph: torch.cuda.CUDAGraph | None) -> Iterator[None]:
        recording = nullcontext() if capture is None or graph is None else capture.recording(graph)
        with recording, nullcontext() if self.owner is None else self.owner.running(phase):
            yield

    @contextmanager
    def _noting_modules_that_run(self) -> Iterator[None]:
        """In the first forward pass, find the modules that run: some delay weight gradients, or hold statistics."""
        if self._warmup.ran is not None or self.module is None or self._holds_hooks:
            yield
            return
        ran: dict[torch.nn.Module, None] = {}
        with ExitStack() as stack:
            for module in self.module.modules():
                stack.callback(module.register_forward_hook(partial(_note_parts, ran)).remove)
            yield
        self._warmup.ran = tuple(ran)
        self._look_for_delays_and_statistics(self._warmup.ran)

    def _look_for_delays_and_statistics(self, ran: Sequence[torch.nn.Module]) -> None:
        self._delayed = DelayedWeightGradients(filter(_delays_weight_gradients, ran), self._all_params)
        if isinstance(self.quantized, QuantizedReplay):
            for module in ran:
                self.quantized.note(module)

    def backward(
        self,
        capture: Capture | None,
        new_grads: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
    ) -> None:
        """Run the backward pass of the last ``forward``, hooks around it.

        Args:
            capture: Records the pass; None for warm-up.
            new_grads: Makes static gradients for the given outputs.

        Raises:
            RuntimeError: an input that requires grad got none, and unused inputs are not allowed; an output depends on
                a parameter that is neither an input nor the module's; or gradients arrive on the legacy default stream.
        """
        self._hooks.run("backward_pre_hooks", self.func)
        if self.roots:
            graph = None if capture is None else capture.new_graph()
            outputs: Sequence[Any] = list(compress(self.outputs, self.differentiable))
            grad_outputs = new_grads(outputs)
            run = self._backward_with_hooks if self._holds_hooks else self._backward
            input_grads, param_grads = run(capture, graph, grad_outputs)
            self._warmup.backward_ran = True
            self._keep_gradients(grad_outputs, input_grads, param_grads)
            self.backward_graph = graph
            if self._copies_results:
                self.grad_inputs = self._weak(self.grad_inputs)
        self._hooks.run("backward_hooks", self.func)
        if not self._retain_graph:
            self.detach()
            if capture is not None:
                self.backward_turn = capture.order.number(self.name)

    def _backward(self, capture: Capture | None, graph: Any, grad_outputs: Grads) -> tuple[Grads, Grads]:
        """Return the gradients of inputs that require grad, and of parameters."""
        inputs = [tensor for tensor in self.inputs if tensor.requires_grad]
        leaves = (*inputs, *self.params)
        check = self._refuse_what_cannot_be_captured(leaves)
        running = self._running("backward", capture, graph)
        with hide_grads_and_hooks(self._all_params), check, allow_nested_backward(), running:
            grads = torch.autograd.grad(
                self.roots, leaves, grad_outputs, retain_graph=self._retain_graph, allow_unused=True
            )
            param_grads: Grads = tuple(map(_with_nested, self.params, grads[len(inputs) :]))
            used = [grad is not None for grad in param_grads]
            if graph is not None and self.owner is not None:
                param_grads = self.owner.take(self.params, param_grads)
        if graph is not None:  # hooks of a parameter that gets no gradient must not run at replay
            self.params, param_grads = tuple(compress(self.params, used)), tuple(compress(param_grads, used))
        return grads[: len(inputs)], param_grads

    def _backward_with_hooks(self, capture: Capture | None, graph: Any, grad_outputs: Grads) -> tuple[Grads, Grads]:
        params = () if self.module is None else self.module.parameters()
        check = self._refuse_what_cannot_be_captured([param for param in params if param.requires_grad])
        with check, self._running("backward", capture, graph):
            torch.autograd.backward(self.roots, grad_outputs)
        grads = [tensor.grad for tensor in self.inputs if tensor.requires_grad]
        for tensor in self.inputs:
            tensor.grad = None
        return grads, ()

    def _refuse_what_cannot_be_captured(self, leaves: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Return the context of a backward pass; the first one's refuses gradients on the legacy default stream.

        Raises:
            RuntimeError: the first pass accumulates gradients elsewhere than in ``leaves``; a replay would lose them.
        """
        if self._warmup.backward_ran:
            return nullcontext()
        known = set(map(id, leaves))
        for leaf in () if self._holds_hooks else connected_leaves(self.roots, stops=leaves):
            # Modules may make leaves in forward.
            if id(leaf) not in known and (self.module is None or isinstance(leaf, torch.nn.Parameter)):
                raise RuntimeError(
                    f"{self.name} uses a tensor of shape {tuple(leaf.shape)} that requires grad and is neither an "
                    "input nor a parameter of its module, so its gradient would be lost: give the module that it "
                    "belongs to, or give it as an input"
                )
        return refuse_legacy_stream(self.name, leaves)

    def _keep_gradients(self, grad_outputs: Grads, input_grads: Grads, param_grads: Grads) -> None:
        unused = next((i for i, grad in enumerate(input_grads) if grad is None), None)
        if unused is not None and not self._allow_unused_input:
            raise RuntimeError(
                f"{self.name} does not use input {unused} of those that require grad; allow_unused_input=True permits "
                "it"
            )
        remaining = iter(grad_outputs)
        self.grad_outputs = tuple(next(remaining) if differentiable else None for differentiable in self.differentiable)
        remaining = iter(input_grads)
        self.grad_inputs = tuple(next(remaining) if tensor.requires_grad else None for tensor in self.inputs)
        self.grad_params = tuple(param_grads)

    @property
    def delays_weight_gradients(self) -> bool:
        """Whether modules that ran in ``forward`` leave their weight gradients to a pass of their own."""
        return bool(self._delayed)

    def weight_gradients(self, capture: Capture | None) -> None:
        """Compute the weight gradients that the last ``backward`` delayed."""
        self.weight_gradient_graph = graph = None if capture is None else capture.new_graph()
        self._delayed.compute(nullcontext() if capture is None or graph is None else capture.recording(graph))

    def detach(self) -> None:
        """Release autograd's nodes and the tensors that they saved; the outputs keep only their memory."""
        self.roots = ()

    def drop_results(self) -> None:
        """Release the results of a warm-up pass."""
        self.detach()
        self.outputs = self.grad_outputs = self.grad_inputs = self.grad_params = ()

    def release_outputs(self) -> None:
        """Let later captures use the memory of the outputs, which nothing reads after the backward pass."""
        if not self._retain_graph:
            self.outputs = self._weak(self.outputs)

    def release_gradients(self, keep: Collection[int] = ()) -> None:
        """Let later captures use the memory of gradients that have been read: all but those of the inputs ``keep``."""
        weak = self._weak(self.grad_inputs)
        self.grad_inputs = tuple(self.grad_inputs[i] if i in keep else grad for i, grad in enumerate(weak))
        read = [None if _read_later(param) else grad for param, grad in self._params_and_grads()]
        self.grad_params = tuple(
            grad if weak is None else weak for weak, grad in zip(self._weak(read), self.grad_params, strict=True)
        )

    def _params_and_grads(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The parameters and their static gradients; nothing where no backward pass ran."""
        return list(zip(self.params, self.grad_params, strict=True)) if self.grad_params else []

    @property
    def trained_params(self) -> tuple[torch.Tensor, ...]:
        """The parameters to which the last backward pass gave a gradient."""
        return tuple(param for param, grad in self._params_and_grads() if grad is not None)

    def _weak(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        """Weak references to those of ``tensors`` that are pool memory, and the others, which must be kept alive."""
        if self.forward_graph is None:
            return tuple(tensors)
        if self._memory is None:
            self._memory = PoolMemory.of(self.forward_graph)
        owned = self._memory.owned(tensor for tensor in tensors if tensor is not None)
        return tuple(
            weak_reference(tensor) if tensor is not None and storage_address(tensor) in owned else tensor
            for tensor in tensors
        )

    @property
    def returns_static_gradients(self) -> bool:
        """Whether a gradient that backward returns lies in the memory of a static gradient of the outputs."""
        addresses = {storage_address(grad) for grad in self.grad_outputs if grad is not None}
        grads = (*self.grad_inputs, *self.grad_params)
        return any(storage_address(grad) in addresses for grad in grads if grad is not None)

    def finish(self) -> None:
        """Make ready to replay, once everything is captured."""
        self._warmup, self._memory = WarmupRecord(), None
        clones = [self._clone_param_grads and not _read_later(param) for param, _ in self._params_and_grads()]
        self._grads_of_params = list(zip(self.grad_params, clones, strict=True))
        if self._holds_hooks or (self.owner is not None and not self.owner.notifies_autograd):
            self._leave_taken_gradients_out()
        self._places = [(tensor, tensor.data_ptr(), tensor.stride()) for tensor in self.inputs]
        self._grad_places = [
            (grad, 0, ()) if grad is None else (grad, grad.data_ptr(), grad.stride()) for grad in self.grad_outputs
        ]
        self._with_grad = self._copied = [i for i, grad in enumerate(self.grad_inputs) if grad is not None]
        self.not_differentiable = [
            i
            for i, (output, takes_part) in enumerate(zip(self.outputs, self.differentiable, strict=True))
            if output is not None and not takes_part
        ]
        if self.owner is not None and type(self.owner).before_forward is not GraphOwner.before_forward:
            self._before_forward = self.owner.before_forward
        self.is_ready = True

    def _leave_taken_gradients_out(self) -> None:
        """Give autograd only the parameters whose gradients it gets, and a leaf that gets none.

        For that leaf it runs the backward pass even if no input requires grad. A parameter in its place would have its
        hooks called, without a gradient.
        """
        pairs = zip(self.params, self._grads_of_params, strict=True) if self.grad_params else ()
        returned = [(param, grad) for param, grad in pairs if grad[0] is not None]
        self._has_leaf = bool(self.params) or self._holds_hooks
        if self._has_leaf:
            returned.append((torch.empty(0, device="cuda", requires_grad=True), (None, False)))
        self.params = tuple(param for param, _ in returned)
        self._grads_of_params = [grad for _, grad in returned]
        self.grad_params = tuple(grad for grad, _ in self._grads_of_params)

    # ------------------------------------------------------------------------------------------------------- replay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the graphs on ``args`` and ``kwargs``.

        Keywords that the graph was not captured with are ignored; ``cuda_graph_stream`` and ``cuda_graph_event`` name
        the stream to replay on and the event that ends it; ``is_first_microbatch`` says, where quantized weights are
        cached, whether they are made anew. A module in the other mode (training or evaluation) than at capture runs
        eagerly.

        Raises:
            RuntimeError: after ``reset``; or a parameter was unfrozen or replaced since capture.
            TypeError: an input that the graph was captured with is missing, is not a tensor, or is nested otherwise.
            ValueError: a tensor is not like the captured one, requires grad and did not at capture, or
                ``is_first_microbatch`` is missing.
        """
        if not self.is_ready:
            self._refuse_after_reset()
        eagerly = self._training is not None and self.func.training != self._training  # type: ignore[attr-defined]
        if torch.is_grad_enabled():
            self._ran_eagerly = eagerly
        if eagerly:
            kwargs.pop("cuda_graph_stream", None)
            kwargs.pop("cuda_graph_event", None)
            return self.eager(*args, **kwargs)
        try:
            inputs: Sequence[torch.Tensor] = (*args, *[kwargs[key] for key in self.kwargs])
        except KeyError as missing:
            raise TypeError(
                f"{self.name} was captured with the keyword {missing.args[0]!r}, which this call does not give"
            ) from None
        if self._structure is not None or not self._expected.accepts(inputs):
            inputs = self._match(inputs)
        if self._snapshot is not None and not replays.suspended_by:  # what is suspended may run eagerly, this may not
            self._snapshot.check()
        get = kwargs.get
        return self.replay(inputs, get("is_first_microbatch"), get("cuda_graph_stream"), get("cuda_graph_event"))

    def replay(
        self,
        inputs: Sequence[torch.Tensor],
        is_first_microbatch: bool | None = None,
        stream: torch.cuda.Stream | None = None,
        event: torch.cuda.Event | None = None,
    ) -> Any:
        """Replay on ``inputs``, flattened, which must be like the static ones; return what ``func`` returned.

        The other arguments are keywords of a call.

        Raises:
            RuntimeError: after ``reset``.
        """
        if not self.is_ready:
            self._refuse_after_reset()
        if self._before_forward is not None:
            self._before_forward()
        after_backward = None if self.quantized is None else self.quantized.before_forward(is_first_microbatch)
        options = None
        if stream is not None or after_backward is not None:
            options = _ReplayOptions(stream, event, after_backward)
        # What Function.apply does in Python for torch.func costs more than the rest of it.
        apply = ReplayNode.apply if torch._C._are_functorch_transforms_active() else _fast_apply
        return self._nest(apply(self, options, *inputs, *self.params))

    def place(self, inputs: Sequence[torch.Tensor]) -> None:
        """Copy ``inputs`` to where the forward graph reads them."""
        for (static, address, stride), given in zip(self._places, inputs):  # noqa: B905
            if given.data_ptr() != address:
                static.copy_(given)
            elif given is not static and given.stride() != stride:
                static.copy_(given.clone())

    def replay_forward(self, inputs: Sequence[torch.Tensor], options: _ReplayOptions | None) -> Tensors:
        """Run the forward graph on ``inputs``, and return its outputs. Further ``inputs`` are parameters."""
        self.place(inputs)
        self.replays += 1
        self.round = self.order.forward(self.forward_turn)
        if options is not None or torch.autograd._profiler_enabled():
            self._run(self.forward_graph, "forward", options)
        else:
            self.forward_graph.replay()  # type: ignore[union-attr]
        if self._copies_results:
            return tuple([output if output is None else output.clone() for output in self.outputs])
        # Autograd keeps gradients of leaves as their grad; the next replay would overwrite them.
        self._copied = [i for i in self._with_grad if inputs[i].is_leaf and inputs[i].requires_grad]
        return tuple([output if output is None else output.detach() for output in self.outputs])

    def replay_backward(
        self, grads: Tensors, options: _ReplayOptions | None, round_of_forward: int, node: Any
    ) -> list[torch.Tensor | None]:
        """Run the backward graph, and return the gradients of inputs and parameters.

        Args:
            grads: The gradients of the outputs; None for zeros.
            round_of_forward: ``round`` right after the forward replay.
            node: Autograd's node of the replay.

        Raises:
            RuntimeError: there is no backward graph, or a later replay has overwritten what it reads; or not all
                gradients were asked for, and the owner would take those of the parameters.
        """
        if self.backward_graph is None:
            raise RuntimeError(f"{self.name} has no backward graph: it was captured without grad, or reset")
        self.order.backward(self.backward_turn, round_of_forward)
        for (static, address, stride), given in zip(self._grad_places, grads):  # noqa: B905
            if static is None:
                continue
            if given is None:
                static.zero_()
            elif given.data_ptr() != address:
                static.copy_(given)
            elif given.stride() != stride:
                static.copy_(given.clone())
        owner = self.owner
        if owner is not None:
            if self._has_leaf and not torch._C._will_engine_execute_node(node.next_functions[-1][0]):
                self._refuse_some_gradients()
            owner.before_backward()
        if options is not None or torch.autograd._profiler_enabled():
            self._run(self.backward_graph, "backward", options)
        else:
            self.backward_graph.replay()
        if owner is not None:
            owner.after_backward()
        if options is not None and options.after_backward is not None:
            options.after_backward()
        # Autograd may keep or accumulate into what it is given: new tensors. `data` makes them at half of the cost of
        # `detach`; what it leaves out, a version shared with the static tensor, nothing reads.
        results = [grad if grad is None else grad.data for grad in self.grad_inputs]
        for index in self._copied:
            results[index] = results[index].clone()  # type: ignore[union-attr]
        results += [
            grad if grad is None else grad.clone() if clone else grad.data for grad, clone in self._grads_of_params
        ]
        return results

    def _refuse_some_gradients(self) -> NoReturn:
        raise RuntimeError(
            f"{self.name}: torch.autograd.grad, or backward(inputs=...), asks for some gradients only, and a replay "
            "adds those of all its parameters to the training's. Call backward() of the whole loss, or train without "
            "graphs (--cuda-graph-impl none)"
        )

    def _run(self, graph: Any, phase: str, options: _ReplayOptions | None) -> None:
        """Replay ``graph``, which shows in a profile as this phase of the callable, on the stream of ``options``."""
        stream = None if options is None else options.stream
        current = torch.cuda.current_stream()
        with torch.profiler.record_function(f"{self.name} {phase} replay"):
            if stream is None or options is None or stream == current:
                graph.replay()
                return
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                graph.replay()
            if options.event is None:
                current.wait_stream(stream)
            else:
                current.wait_event(options.event)

    def backward_dw(self) -> None:
        """Replay the weight gradients that the last backward pass delayed; nothing where it delays none.

        As in eager mode, a module that does not accumulate into ``main_grad`` sets ``grad`` of its parameters. The
        hooks that modules run after their weight gradients run. If the last call with grad ran eagerly, so does this.

        Raises:
            RuntimeError: after ``reset``.
        """
        if not self.is_ready:
            self._refuse_after_reset()
        if self._ran_eagerly:
            self._delayed.compute_eagerly()
        elif self.weight_gradient_graph is not None:
            self._run(self.weight_gradient_graph, "weight gradients", None)
            self._delayed.hand_out(self._clone_param_grads)

    # ------------------------------------------------------------------------------------------------------- checks

    def _refuse_after_reset(self) -> NoReturn:
        raise RuntimeError(f"the graphs of {self.name} were reset; capture them again to replay them")

    def name_inputs(self, owner: str, names: Sequence[str], advice: str) -> None:
        """Set the names that errors use.

        Args:
            names: What they call each input, positional ones first.
            advice: What follows an error about another shape or dtype.
        """
        if len(names) == len(self._expected):  # inputs that are nested keep their numbers
            self._expected.rename(owner, names.__getitem__, advice)
        self.name = owner
        for turn in (self.forward_turn, self.backward_turn):
            if turn is not None:
                self.order.rename(turn, owner)

    def _watch_parameters(self, module: torch.nn.Module) -> None:
        """Refuse replays once a parameter of ``module`` is another object: the graphs go on reading the former one."""
        used = set(map(id, (*self.params, *self._frozen)))
        held = [
            (inner._parameters, key, f"parameter {key} of {name}")
            for inner, name in named(module).items()
            for key, param in inner._parameters.items()
            if id(param) in used
        ]
        if held:
            replaced = identities([name for *_, name in held], lambda: [own.get(key) for own, key, _ in held])
            self._snapshot = self._compare([replaced])

    def _compare(self, aspects: list[Aspect]) -> Snapshot:
        """Return a snapshot of ``aspects``, and of frozen parameters, of which the backward graph has no gradient."""
        if frozen := self._frozen:
            names = [f"requires_grad of a parameter of shape {tuple(param.shape)}" for param in frozen]
            requires = Aspect(
                names,
                lambda: [param.requires_grad and torch.is_grad_enabled() for param in frozen],
                then=[False] * len(names),
            )
            aspects = [*aspects, requires]
        return Snapshot(f"{_PARAMETERS} ({self.name})", *aspects)

    def _match(self, given: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Return the inputs of a call, flattened, if they are like the static ones.

        Raises:
            TypeError, ValueError: they are not.
        """
        inputs, structure = flat(tuple(given))
        if len(inputs) != len(self._expected):
            raise TypeError(f"{self.name} was captured with {len(self.inputs)} tensors, this call gives {len(inputs)}")
        self._expected.check(inputs)
        if structure != self._structure:
            captured, called = (_nested(len(inputs), spec) for spec in (self._structure, structure))
            raise TypeError(f"{self.name} was captured with inputs nested as {captured}, this call gives {called}")
        return inputs

    # ------------------------------------------------------------------------------------------------------ life cycle

    def replace_methods(self, module: torch.nn.Module) -> None:
        """Replace ``module.forward`` until ``reset``; add ``reset`` and ``backward_dw``, as TransformerEngine does."""
        self._taken = TakenForward(module, self)
        vars(module).update(reset=self.reset, backward_dw=self.backward_dw)
        self._watch_parameters(module)

    def forget_delayed(self) -> None:
        """Drop the delayed weight gradients of a failed pass."""
        self._delayed.forget()

    def reset(self) -> None:
        """Free the graphs and every tensor they own. They can no longer be replayed."""
        for graph in (self.forward_graph, self.backward_graph, self.weight_gradient_graph):
            if graph is not None:
                graph.reset()
        self.forward_graph = self.backward_graph = self.weight_gradient_graph = self._memory = None
        self.is_ready = False
        self.drop_results()
        self.args, self.kwargs, self.inputs, self.params, self._all_params, self._frozen = (), {}, (), (), (), ()
        self._places, self._grad_places, self._grads_of_params = [], [], []
        self._snapshot = None
        self._delayed, self._warmup = DelayedWeightGradients((), ()), WarmupRecord()
        self._hooks, self._context = CaptureTimeHooks(self.name, None), nullcontext
        self.quantized = None
        if self._taken is not None:
            self._taken.end()
            for name in ("reset", "backward_dw"):
                vars(self.func).pop(name, None)
            self._taken = None
        self._before_forward = None
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.forget()


class ReplayNode(torch.autograd.Function):
    """Replays with autograd: a ``GraphedCallable``, its options, its inputs, then its parameters."""

    @staticmethod
    def forward(ctx, graphed, options, *inputs):
        outputs = graphed.replay_forward(inputs, options)
        ctx.replayed = graphed, options, graphed.round
        ctx.materialize_grads = False
        if graphed.not_differentiable:
            ctx.mark_non_differentiable(*(outputs[i] for i in graphed.not_differentiable))
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        graphed, options, round_ = ctx.replayed
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                f"{graphed.name}: CUDA graphs compute first derivatives only, without create_graph=True; run it "
                "eagerly for second ones"
            )
        return None, None, *graphed.replay_backward(grads, options, round_, ctx)


_fast_apply: Callable[..., Tensors] = super(torch.autograd.Function, ReplayNode).apply


# ------------------------------------------------------------------------------------------------------------ capture


def capture_passes(
    plan: Plan,
    graphed: Sequence[GraphedCallable],
    *,
    num_warmup_iters: int,
    training: bool = True,
    shares_memory: bool = False,
    pool: tuple | None = None,
    contexts: Iterable[AbstractContextManager] = (),
    before_warmup: Callable[[], Any] | None = None,
    after_warmup: Callable[[], Any] | None = None,
) -> None:
    """Warm up and capture the passes of ``plan``, in the order in which they will be replayed.

    Random states, buffers of modules and garbage collection are restored. After an exception there are no graphs.

    Args:
        graphed: The callable of each slot of the plan.
        num_warmup_iters: Iterations of the whole plan before capture.
        training: Whether backward passes run.
        shares_memory: Whether graphs that are captured later may use memory that no later replay reads.
        pool: The memory pool of the graphs; None for a new one.
        contexts: Further ones around warm-up and capture.
        before_warmup, after_warmup: Called once each.

    Raises:
        RuntimeError: a gradient is accumulated on the legacy default stream, or something cannot be captured.
        ValueError: modules delay weight gradients, and the plan does not compute them.
    """
    modules = [*dict.fromkeys(each.module for each in graphed if each.module is not None)]
    try:
        with capturing(preserve_buffers(modules), *contexts):
            if before_warmup is not None:
                before_warmup()
            if not num_warmup_iters:
                make_workspaces()
            with rebind_buffers(modules):  # the graphs read the buffers that are there at replay
                for _ in range(num_warmup_iters):
                    run_passes(plan, graphed, None, training, shares_memory)
            if after_warmup is not None:
                after_warmup()
            release_cached_memory()
            run_passes(plan, graphed, Capture(pool), training, shares_memory)
        for each in graphed:
            each.finish()
    except BaseException:
        for each in graphed:
            each.forget_delayed()
        for each in graphed:
            each.reset()
        raise


def run_passes(
    plan: Plan, graphed: Sequence[GraphedCallable], capture: Capture | None, training: bool, shares_memory: bool
) -> None:
    """Run the passes of ``plan`` once. Arguments are those of ``capture_passes``; without ``capture`` to warm up."""
    phase = "warm-up" if capture is None else "capture"
    static_grads = BufferPool[tuple[torch.Tensor, ...]]()
    lent: dict[int, Lease[tuple[torch.Tensor, ...]]] = {}  # by slot

    def lend(slot: int, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return static gradients for the outputs of ``slot``, which other slots get once it has given them back."""
        key = tuple((output.shape, output.stride(), output.dtype, output.layout) for output in outputs)
        lent[slot] = static_grads.acquire(key, lambda: tuple(map(torch.zeros_like, outputs)))
        return lent[slot].buffers

    last_steps, gradients_read = plan.last_steps(), plan.gradients_read()
    with_weight_gradients = {step.slot for step in plan.steps if step.kind is Pass.WEIGHT_GRADIENTS}
    for step in plan.steps:
        each, kind = graphed[step.slot], step.kind
        if kind is Pass.FORWARD or (training and (kind is Pass.BACKWARD or each.delays_weight_gradients)):
            with torch.profiler.record_function(f"{each.name} {kind.value} {phase}"):
                if kind is Pass.FORWARD:
                    each.forward(capture)
                elif kind is Pass.WEIGHT_GRADIENTS:
                    each.weight_gradients(capture)
                elif each.delays_weight_gradients and step.slot not in with_weight_gradients:
                    raise ValueError(
                        f"{each.name} delays its weight gradients, so _order must run them (-c - 0.5 for chunk c) "
                        "after its backward"
                    )
                else:
                    each.backward(capture, partial(lend, step.slot))
        if not training:
            each.detach()
        returned = step.slot in lent and shares_memory and step in last_steps
        if capture is None:
            if kind is Pass.BACKWARD or not training:
                each.drop_results()
            if returned:
                static_grads.release(lent.pop(step.slot))
            continue
        if shares_memory and kind is Pass.BACKWARD:
            # Without training it did not run; nothing reads the outputs after its place in the plan.
            each.release_outputs()
            for read in gradients_read.get(step, ()):
                graphed[read].release_gradients()
        # Gradients that backward returns unchanged would be overwritten before they are read.
        if returned and not each.returns_static_gradients:
            static_grads.release(lent.pop(step.slot))


# ---------------------------------------------------------------------------------------------------- weight gradients


class DelayedWeightGradients:
    """Weight gradients of a pass of their own, as with TransformerEngine's ``delay_wgrad_compute``.

    Args:
        modules: Modules with ``need_backward_dw`` and ``backward_dw``, which run in the forward pass.
    """

    def __init__(self, modules: Iterable[Any], params: Iterable[torch.Tensor]):
        self._modules = tuple(modules)
        self._compute = [module.backward_dw for module in self._modules]  # a graphed module replaces this method
        self._notify = [
            module._trigger_wgrad_accumulation_and_reduce_hooks
            for module in self._modules
            if hasattr(module, "_trigger_wgrad_accumulation_and_reduce_hooks")
        ]
        self._params = tuple(params)
        self._grads: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._modules)

    def compute(self, recording: AbstractContextManager) -> None:
        """Compute the gradients that the last backward pass delayed; ``grad`` of parameters is restored afterwards."""
        # Hidden, because modules do not set a grad that exists already.
        with hide_grads_and_hooks(self._params):
            with recording:
                self.compute_eagerly()
            self._grads = [(param, param.grad) for param in self._params if param.grad is not None]

    def compute_eagerly(self) -> None:
        """Compute the gradients that the last backward pass of the modules delayed."""
        for compute in self._compute:
            compute()

    def hand_out(self, clone: bool) -> None:
        """Set ``grad`` of parameters to the gradients of a replay, and run the modules' hooks for that.

        Parameters of modules that accumulate into ``main_grad`` get no ``grad``.
        """
        for param, grad in self._grads:
            param.grad = grad.clone() if clone else grad
        for notify in self._notify:
            notify()

    def forget(self) -> None:
        """Drop the delayed work of a failed pass, which the next pass would otherwise run."""
        for module in self._modules:
            queue = getattr(getattr(module, "wgrad_store", None), "context", None)  # TransformerEngine's
            while queue is not None and queue.qsize():
                queue.get()


def _delays_weight_gradients(module: Any) -> bool:
    return hasattr(module, "need_backward_dw") and module.need_backward_dw()


# ------------------------------------------------------------------------------------------------------------ structure


def module_of(func: Callable) -> torch.nn.Module | None:
    """The module whose parameters ``func`` uses: itself, that of a bound method, or what a partial holds of either."""
    if isinstance(func, torch.nn.Module):
        return func
    if isinstance(func, MethodType):
        return func.__self__ if isinstance(func.__self__, torch.nn.Module) else None
    if not isinstance(func, partial):
        return None
    given = [value for value in (*func.args, *func.keywords.values()) if isinstance(value, torch.nn.Module)]
    module = module_of(func.func)
    return given[0] if module is None and len(given) == 1 else module


def _read_later(param: torch.Tensor) -> bool:
    """Whether a hook after the weight gradients reads ``param.grad``, and not autograd when the backward pass returns.

    TransformerEngine marks the parameters of modules that delay their weight gradients. What backward returns of them
    is a placeholder, or a bias gradient that the hook reads, so it is not copied and must stay until then.
    """
    return getattr(param, "skip_backward_post_hook", False)


def _note_parts(ran: dict[torch.nn.Module, None], module: torch.nn.Module, *_: Any) -> None:
    # A sequence of TransformerEngine's operations runs them fused, without calling them; grouped experts likewise.
    fused = hasattr(module, "_module_groups") or getattr(module, "calls_no_inner_modules", False)
    ran.update(dict.fromkeys(module.modules() if fused else (module,)))


def _with_nested(param: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Add what a backward pass inside the backward pass has accumulated: activation checkpointing runs one."""
    if param.grad is None:
        return grad
    return param.grad if grad is None else param.grad + grad


def _flat_inputs(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple[torch.Tensor, ...], TreeSpec | None]:
    for key, value in kwargs.items():
        for leaf in tree_leaves(value):
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(f"sample_kwargs of {name}: {key!r} holds {leaf!r}, which is not a tensor")
    leaves, structure = flat((*args, *kwargs.values()))
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"sample_args of {name} hold {leaf!r}, which is not a tensor")
    return tuple(leaves), structure


def flat(inputs: tuple) -> tuple[Sequence[Any], TreeSpec | None]:
    """The leaves of ``inputs`` and how they are nested: None for a tuple of tensors, which is the usual case."""
    if all(isinstance(item, torch.Tensor) for item in inputs):
        return inputs, None
    return tree_flatten(inputs)


def _nested(count: int, structure: TreeSpec | None) -> Any:
    """Numbers in place of the leaves that ``flat`` found."""
    numbers = range(count)
    return tuple(numbers) if structure is None else tree_unflatten(numbers, structure)
