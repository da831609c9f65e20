"""Callables that replay CUDA graphs, and the loop that captures several of them in replay order."""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import compress
from operator import itemgetter
from typing import Any, Literal

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure, tree_unflatten

from ..errors import UnsupportedError
from ..hooks import runs_outside_graphs
from ..replacements import TakenForward
from ..snapshot import InputSignature
from .capture_time_hooks import CaptureTimeHooks
from .graph import (
    Capture,
    ReplayOrder,
    WarmUp,
    allow_nested_backward,
    capture_stream,
    connected_leaves,
    hide_grads_and_hooks,
    make_workspaces,
    pause_gc,
    preserve_buffers,
    rebind_buffers,
    refuse_legacy_stream,
)
from .memory import PoolMemory, release_cached_memory, storage_address, version_of, weak_reference
from .plan import Pass, Plan
from .quantization import Quantization, RecordedQuantization
from .rng import preserve_rng

Phase = Literal["forward", "backward"]
Tensors = tuple[torch.Tensor | None, ...]
Grads = Sequence[torch.Tensor | None]
_Places = list[tuple[torch.Tensor | None, int, tuple[int, ...]]]


class GraphOwner:
    """Owns the resources that the graphs of a callable use. The methods of this base class do nothing."""

    def running(self, phase: Phase) -> AbstractContextManager[None]:
        """Return the context for warm-up and capture of a phase.

        On exit, the current stream must wait for all other streams that were used in the context.
        """
        return nullcontext()

    def consume_gradients(self, params: Sequence[torch.Tensor], grads: Grads) -> Grads:
        """Consume parameter gradients inside the backward graph, which records the operations run here.

        Args:
            params: The parameters that require grad.
            grads: Their gradients; None for unused parameters.

        Returns:
            ``grads`` with None in place of each consumed gradient; the others are returned to autograd.
        """
        return grads

    def before_forward(self) -> None:
        """Called before each replay of the forward graph. The replay waits for work that is enqueued here."""

    def before_eager_forward(self) -> None:
        """Called before an eager forward pass that other ranks may replay, to start the same collectives as they do."""

    def before_backward(self) -> None:
        """Called before each replay of the backward graph. The replay waits for work that is enqueued here."""

    def after_backward(self) -> None:
        """Called after each replay of the backward graph, on the current stream."""

    def forget(self) -> None:
        """Release resources; called once, after the graphs are freed."""


class GraphedCallable:
    """A callable for one micro-batch, with its forward and backward graphs and their static tensors.

    After ``capture_passes``, calls accept tensors of the captured shapes and dtypes, and are differentiable. Outputs
    live in graph memory and stay valid until the next replay of a graph that shares this memory. Modifying an output in
    place may change gradients without an error from autograd. Inputs may alias graph memory, but a static input must
    only be passed in its own position.

    Args:
        name: Name for errors and profiles.
        args, kwargs: Static inputs: tensors, possibly nested.
        module: The module whose parameters and submodules ``func`` uses; None for ``func`` itself if it is a module.
        owner: Owner of the resources that the graphs use, if any.
        quantization: Quantization settings; None without quantization.
        hooks: Hooks to run around passes in warm-up and capture, outside the graphs.
        holds_hooks: Whether the graphs record the hooks of modules and parameters, including the collectives and
            gradient accumulation that hooks launch. Inputs that require grad must then be leaves, and replays return
            copies of outputs, which stay valid after the next replay. If False, each replay runs parameter hooks on the
            gradients that it returns.
        allow_unused_input: Whether inputs that require grad may have no gradient.
        retain_graph: Whether backward retains the autograd graph.
        clone_param_grads: Whether backward returns copies of parameter gradients rather than the static ones.
            Gradients of parameters marked ``skip_backward_post_hook`` are never copied.

    Attributes:
        eager: The function, or the module's ``forward``, without graphs.
        inputs: The static inputs, flattened: ``args``, then the values of ``kwargs``.
        outputs: The static outputs, flattened.
        differentiable: Whether each output takes part in autograd.
        grad_outputs: The static gradients of the outputs; None for outputs that take no part in autograd.
        grad_inputs: The static gradients of the inputs; None for inputs without a gradient.
        params: The parameters that are inputs of the autograd node.
        grad_params: The static gradients of ``params``; None for parameters without a gradient.
        forward_graph: The forward graph; None before capture and after ``reset``.
        backward_graph: The backward graph; None if nothing requires grad.
        weight_gradient_graph: The graph of delayed weight gradients; None if backward delays none.
        order: Checks the order of replays.
        forward_turn, backward_turn: The passes' positions in capture order; ``backward_turn`` is None without a
            backward graph or with ``retain_graph``.
        round: Round of the last forward replay, from ``order``.
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
        quantization: Quantization | RecordedQuantization | None = None,
        hooks: CaptureTimeHooks | None = None,
        holds_hooks: bool = False,
        allow_unused_input: bool = False,
        retain_graph: bool = False,
        clone_param_grads: bool = True,
    ):
        self.name, self.func, self.args, self.kwargs = name, func, args, kwargs
        self.eager = func.forward if isinstance(func, torch.nn.Module) else func
        self.inputs: tuple[torch.Tensor, ...] = (*args, *kwargs.values())
        self._structure: TreeSpec | None = None  # the structure of nested inputs
        name_of: Callable[[int], str] = [*map("input {}".format, range(len(args))), *kwargs].__getitem__
        if not all(isinstance(each, torch.Tensor) for each in self.inputs):
            leaves, self._structure = tree_flatten(self.inputs)
            self.inputs, name_of = tuple(leaves), "input {}".format
        self._keywords = tuple(kwargs)
        self._expected = InputSignature(name, self.inputs, name_of)
        self.module = func if module is None and isinstance(func, torch.nn.Module) else module
        self._training = getattr(func, "training", None)
        # If graphs record hooks, parameters may be replaced before capture, and replays return no gradients for them.
        known = () if self.module is None or holds_hooks else self.module.parameters()
        self._trainable: tuple[torch.Tensor, ...] = tuple(param for param in known if param.requires_grad)
        self.params = self._trainable
        self.owner = GraphOwner() if owner is None else owner
        self.quantization = quantization
        self._hooks = hooks or CaptureTimeHooks(name, None)
        self._holds_hooks = holds_hooks
        self._allow_unused_input, self._retain_graph = allow_unused_input, retain_graph
        self._clone_param_grads = clone_param_grads
        self._was_noted = self._backward_was_checked = False
        self._delayed = DelayedWeightGradients((), ())

        self.forward_graph: torch.cuda.CUDAGraph | None = None
        self.backward_graph: torch.cuda.CUDAGraph | None = None
        self.weight_gradient_graph: torch.cuda.CUDAGraph | None = None
        self._memory: PoolMemory | None = None
        self.roots: Sequence[torch.Tensor | GradientEdge] = ()  # where the backward pass starts
        self.outputs: Tensors = ()
        self.differentiable: tuple[bool, ...] = ()
        self.grad_outputs: Tensors = ()
        self.grad_inputs: Tensors = ()
        self.grad_params: Tensors = ()
        self._returned: Callable[[Tensors], Any] = tuple  # converts outputs to the return value of ``func``
        self.order = ReplayOrder()
        self.forward_turn = -1
        self.backward_turn: int | None = None

        # Used by replays; set by ``finish``.
        self.round = 0
        self.not_differentiable: list[int] = []
        self._places: _Places = []
        self._grad_places: _Places = []
        self._with_grad: list[int] = []  # indices of inputs with a gradient
        self._copied: list[int] = []  # indices of inputs whose gradients backward returns as copies
        self._grads_of_params: list[tuple[torch.Tensor | None, bool]] = []  # static gradient, whether to copy it
        self._grad_enabled = self._has_leaf = self._ran_eagerly = False
        self._taken: TakenForward | None = None

    def forward(self, capture: Capture | WarmUp) -> None:
        """Run the forward pass on the static inputs, with hooks around it; record it if ``capture`` is a ``Capture``.

        Raises:
            TypeError: ``func`` returned a value that is neither a tensor nor None.
            UnsupportedError: ``func`` wrote an input in place.
        """
        graph = capture.new_graph()
        versions = list(map(version_of, self.inputs))
        self._hooks.run("forward_pre_hooks", self.func, self.args, dict(self.kwargs))  # a hook may change it
        with (
            self._note_modules_that_run(),
            capture.recording(graph),
            self.owner.running("forward"),
            nullcontext() if self.quantization is None else self.quantization.context(),
        ):
            output = self.func(*self.args, **self.kwargs)
        for index, (tensor, version) in enumerate(zip(self.inputs, versions, strict=True)):
            if version_of(tensor) != version:
                raise UnsupportedError(
                    f"{self.name} writes {self._expected.name_of(index)} in place, but a replay would modify only its "
                    "static input: clone it first"
                )
        self._hooks.run("forward_hooks", self.func, self.args, output)
        outputs, structure = tree_flatten(output)
        if isinstance(output, torch.Tensor):
            self._returned = itemgetter(0)
        else:
            is_tuple = structure == tree_structure(tuple(outputs))
            self._returned = tuple if is_tuple else partial(tree_unflatten, treespec=structure)
        for leaf in outputs:
            if not isinstance(leaf, torch.Tensor | None):
                raise TypeError(f"{self.name} returned {leaf!r}: return tensors and None only")
        # An output may require grad even under no_grad: pipeline stages of megatron-core set it.
        self._grad_enabled = torch.is_grad_enabled()
        self.differentiable = tuple(leaf is not None and self._grad_enabled and leaf.requires_grad for leaf in outputs)
        self.roots = list(compress(outputs, self.differentiable))
        if self._holds_hooks:  # an edge does not keep an output allocated
            self.roots = list(map(get_gradient_edge, self.roots))
        self.outputs = tuple(leaf if leaf is None else leaf.detach() for leaf in outputs)
        self.forward_graph = graph
        if self._holds_hooks:
            self.outputs = self._weak(self.outputs)
        if isinstance(capture, Capture):
            self.order, self.forward_turn = capture.order, capture.order.number()

    @contextmanager
    def _note_modules_that_run(self) -> Iterator[None]:
        """Context manager that records which modules run in the first forward pass."""
        if self._was_noted or self.module is None or self._holds_hooks:
            yield
            return
        ran: dict[torch.nn.Module, None] = {}
        with ExitStack() as stack:
            for module in self.module.modules():
                stack.callback(module.register_forward_hook(partial(_note_parts, ran)).remove)
            yield
        self._was_noted = True
        self._delayed = DelayedWeightGradients(filter(_delays_weight_gradients, ran), self._trainable)
        if isinstance(self.quantization, Quantization):
            self.quantization.note(ran)

    def backward(
        self,
        capture: Capture | WarmUp,
        new_grads: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
    ) -> None:
        """Run the backward pass of the last ``forward``, with hooks around it; record it if given a ``Capture``.

        ``new_grads`` returns static gradients for a sequence of outputs.

        Raises:
            RuntimeError: An input that requires grad has no gradient, and unused inputs are not allowed; an output
                depends on a parameter that is neither an input nor the module's; or gradients are accumulated on the
                legacy default stream.
        """
        self._hooks.run("backward_pre_hooks", self.func)
        if self.roots:
            graph = capture.new_graph()
            outputs: Sequence[Any] = list(compress(self.outputs, self.differentiable))
            grad_outputs = new_grads(outputs)
            run = self._backward_with_hooks if self._holds_hooks else self._backward
            input_grads, param_grads = run(capture, graph, grad_outputs)
            self._backward_was_checked = True
            self._keep_gradients(grad_outputs, input_grads, param_grads)
            self.backward_graph = graph
            if self._holds_hooks:
                self.grad_inputs = self._weak(self.grad_inputs)
        self._hooks.run("backward_hooks", self.func)
        if not self._retain_graph:
            self.detach()
            if isinstance(capture, Capture):
                self.backward_turn = capture.order.number()

    def _backward(self, capture: Capture | WarmUp, graph: Any, grad_outputs: Grads) -> tuple[Grads, Grads]:
        """Run the backward pass; return the gradients of inputs that require grad, and of parameters."""
        inputs = [tensor for tensor in self.inputs if tensor.requires_grad]
        leaves = (*inputs, *self.params)
        check = self._check_gradients(leaves)
        with (
            hide_grads_and_hooks(self._trainable),
            check,
            allow_nested_backward(),
            capture.recording(graph),
            self.owner.running("backward"),
        ):
            grads = torch.autograd.grad(
                self.roots, leaves, grad_outputs, retain_graph=self._retain_graph, allow_unused=True
            )
            param_grads: Grads = tuple(map(_with_nested, self.params, grads[len(inputs) :]))
            used = [grad is not None for grad in param_grads]
            if graph is not None:
                param_grads = self.owner.consume_gradients(self.params, param_grads)
        if graph is not None:  # hooks of a parameter without a gradient must not run at replay
            self.params, param_grads = tuple(compress(self.params, used)), tuple(compress(param_grads, used))
        return grads[: len(inputs)], param_grads

    def _backward_with_hooks(self, capture: Capture | WarmUp, graph: Any, grad_outputs: Grads) -> tuple[Grads, Grads]:
        params = () if self.module is None else self.module.parameters()
        check = self._check_gradients([param for param in params if param.requires_grad])
        with check, capture.recording(graph), self.owner.running("backward"):
            torch.autograd.backward(self.roots, grad_outputs)
        grads = [tensor.grad for tensor in self.inputs if tensor.requires_grad]
        for tensor in self.inputs:
            tensor.grad = None
        return grads, ()

    def _check_gradients(self, leaves: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Return a context that rejects unsupported gradients of the first backward pass.

        These are gradients of tensors outside ``leaves``, which replays would lose, and gradients accumulated on the
        legacy default stream, which cannot be captured.
        """
        if self._backward_was_checked:
            return nullcontext()
        known = set(map(id, leaves))
        for leaf in () if self._holds_hooks else connected_leaves(self.roots, stops=leaves):
            # Modules may create leaves in forward.
            if id(leaf) not in known and (self.module is None or isinstance(leaf, torch.nn.Parameter)):
                raise RuntimeError(
                    f"{self.name} uses a tensor of shape {tuple(leaf.shape)} that requires grad and is neither an "
                    "input nor a parameter of its module, so its gradient would be lost: capture the module that it "
                    "belongs to, or pass it as an input"
                )
        return refuse_legacy_stream(self.name, leaves)

    def _keep_gradients(self, grad_outputs: Grads, input_grads: Grads, param_grads: Grads) -> None:
        unused = next((i for i, grad in enumerate(input_grads) if grad is None), None)
        if unused is not None and not self._allow_unused_input:
            raise RuntimeError(
                f"{self.name} does not use one of its inputs (index {unused} among inputs that require grad): "
                "remove or detach it, or pass allow_unused_input=True"
            )
        remaining = iter(grad_outputs)
        self.grad_outputs = tuple(next(remaining) if differentiable else None for differentiable in self.differentiable)
        remaining = iter(input_grads)
        self.grad_inputs = tuple(next(remaining) if tensor.requires_grad else None for tensor in self.inputs)
        self.grad_params = tuple(param_grads)

    @property
    def delays_weight_gradients(self) -> bool:
        """Whether modules that ran in ``forward`` compute their weight gradients in a separate pass."""
        return bool(self._delayed)

    def weight_gradients(self, capture: Capture | WarmUp) -> None:
        """Compute the weight gradients that the last ``backward`` delayed."""
        self.weight_gradient_graph = graph = capture.new_graph()
        self._delayed.compute(capture.recording(graph))

    def detach(self) -> None:
        """Release autograd nodes and their saved tensors."""
        self.roots = ()

    def drop_results(self) -> None:
        """Release outputs, gradients and autograd nodes of a pass."""
        self.detach()
        self.outputs = self.grad_outputs = self.grad_inputs = self.grad_params = ()

    def release_outputs(self) -> None:
        """Let later captures reuse the memory of the outputs, which nothing reads after the backward pass."""
        if not self._retain_graph:
            self.outputs = self._weak(self.outputs)

    def release_gradients(self) -> None:
        """Let later captures reuse the memory of gradients."""
        self.grad_inputs = self._weak(self.grad_inputs)
        weak = self._weak(self.grad_params)
        pairs = zip(self.params, self.grad_params)  # noqa: B905, without a backward pass there are no gradients
        self.grad_params = tuple(
            grad if _is_read_later(param) else other for (param, grad), other in zip(pairs, weak, strict=True)
        )

    def _weak(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        """Return weak references to tensors in pool memory. Other tensors are returned unchanged and stay alive."""
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
        """Whether backward returns a gradient that shares memory with the static gradient of an output."""
        addresses = {storage_address(grad) for grad in self.grad_outputs if grad is not None}
        grads = (*self.grad_inputs, *self.grad_params)
        return any(storage_address(grad) in addresses for grad in grads if grad is not None)

    def finish(self) -> None:
        """Store the addresses and gradients that replays use. Call this after all graphs are captured."""
        self._memory = None
        pairs = zip(self.params, self.grad_params)  # noqa: B905, without a backward pass there are no gradients
        self._grads_of_params = [(grad, self._clone_param_grads and not _is_read_later(param)) for param, grad in pairs]
        if self._holds_hooks or any(grad is None for grad in self.grad_params):
            self._omit_consumed_gradients()
        self._places = _places_of(self.inputs)
        self._grad_places = _places_of(self.grad_outputs)
        self._with_grad = self._copied = [i for i, grad in enumerate(self.grad_inputs) if grad is not None]
        self.not_differentiable = [
            i
            for i, (output, takes_part) in enumerate(zip(self.outputs, self.differentiable, strict=True))
            if output is not None and not takes_part
        ]

    def _omit_consumed_gradients(self) -> None:
        """Keep only parameters whose gradients are returned to autograd, and add a leaf without a gradient.

        The leaf makes autograd run the backward pass even if no input requires grad. With a parameter instead, autograd
        would call the parameter's hooks without a gradient.
        """
        pairs = zip(self.params, self._grads_of_params)  # noqa: B905
        returned = [(param, grad) for param, grad in pairs if grad[0] is not None]
        self._has_leaf = bool(self.params) or self._holds_hooks
        if self._has_leaf:
            returned.append((torch.empty(0, device="cuda", requires_grad=True), (None, False)))
        self.params = tuple(param for param, _ in returned)
        self._grads_of_params = [grad for _, grad in returned]
        self.grad_params = tuple(grad for grad, _ in self._grads_of_params)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the graphs on ``args`` and ``kwargs``.

        The keyword ``is_first_microbatch`` controls whether cached weights are requantized. Any other keyword that was
        not captured is ignored if its value is not a tensor. The call runs eagerly if the module's mode (training or
        evaluation) has changed since capture, or if grad is enabled now but was not at capture.

        Raises:
            RuntimeError: The graphs were reset.
            TypeError: An input is missing, is new since capture, is not a tensor, or is nested differently.
            ValueError: The shape or dtype of a tensor differs from capture; a tensor requires grad but did not at
                capture; or ``is_first_microbatch`` is missing.
        """
        eagerly = self._training is not None and self.func.training != self._training  # type: ignore[attr-defined]
        if torch.is_grad_enabled():
            eagerly = self._ran_eagerly = eagerly or not self._grad_enabled
        if eagerly:
            return self.eager(*args, **kwargs)
        try:
            inputs: Sequence[torch.Tensor] = (*args, *[kwargs[key] for key in self._keywords])
        except KeyError as missing:
            raise TypeError(f"{self.name} was captured with the keyword {missing.args[0]!r}: pass it") from None
        for key in kwargs if len(kwargs) > len(self._keywords) else ():
            if key not in self._keywords and isinstance(kwargs[key], torch.Tensor):
                raise TypeError(f"{self.name} was captured without the keyword {key!r}: omit it, or recapture with it")
        if self._structure is not None or not self._expected.accepts(inputs):
            inputs = self._match(inputs)
        return self.replay(inputs, kwargs.get("is_first_microbatch"))

    def _match(self, given: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Flatten the inputs of a call; raise TypeError or ValueError if they do not match the static ones."""
        inputs, structure = tree_flatten(tuple(given))
        if len(inputs) != len(self._expected):
            raise TypeError(
                f"{self.name} was captured with {len(self._expected)} tensors, but called with {len(inputs)}: pass "
                "the same number"
            )
        self._expected.check(inputs)
        expected = tree_structure(self.inputs) if self._structure is None else self._structure
        if structure != expected:
            captured, called = (tree_unflatten(range(len(inputs)), spec) for spec in (expected, structure))
            raise TypeError(
                f"{self.name} was captured with inputs of structure {captured}, but called with {called}: pass the "
                "same structure"
            )
        return inputs

    def replay(self, inputs: Sequence[torch.Tensor], is_first_microbatch: bool | None = None) -> Any:
        """Replay on flattened ``inputs``, which must match the static inputs; return outputs nested as at capture.

        Raises RuntimeError if the graphs were reset.
        """
        if self.forward_graph is None:
            raise RuntimeError(f"the graphs of {self.name} were reset: capture them again to replay them")
        self.owner.before_forward()
        after_backward = None if self.quantization is None else self.quantization.before_forward(is_first_microbatch)
        # Skip the Python code in Function.apply that supports torch.func: it takes longer than the rest.
        apply = ReplayNode.apply if torch._C._are_functorch_transforms_active() else _fast_apply
        return self._returned(apply(self, after_backward, *inputs, *self.params))

    def replay_forward(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        """Run the forward graph and return its outputs. ``inputs`` may be followed by parameters, which are ignored."""
        _copy_in(self._places, inputs)
        self.round = self.order.forward(self.forward_turn)
        self._launch(self.forward_graph, "forward")
        if self._holds_hooks:
            return tuple([output if output is None else output.clone() for output in self.outputs])
        # Autograd stores gradients of leaves as their grad, which the next replay would overwrite.
        self._copied = [i for i in self._with_grad if inputs[i].is_leaf and inputs[i].requires_grad]
        return tuple([output if output is None else output.detach() for output in self.outputs])

    def replay_backward(
        self, grads: Tensors, after_backward: Callable[[], None] | None, round_of_forward: int, node: Any
    ) -> list[torch.Tensor | None]:
        """Run the backward graph on ``grads`` (None for zeros) and return the gradients of inputs and parameters.

        Args:
            after_backward: Called right after the backward replay.
            round_of_forward: The value of ``round`` after the forward replay.
            node: The autograd node of the replay.

        Raises:
            RuntimeError: There is no backward graph; a later replay has overwritten the activations; or autograd
                requested only some gradients, but the owner consumes the gradients of all parameters.
        """
        if self.backward_graph is None:
            raise RuntimeError(
                f"{self.name} has no backward graph: it was reset, or captured without grad or in evaluation mode. "
                "Recapture it"
            )
        self.order.backward(self.name, self.backward_turn, round_of_forward)
        _copy_in(self._grad_places, grads)
        if self._has_leaf and not torch._C._will_engine_execute_node(node.next_functions[-1][0]):
            raise RuntimeError(
                f"{self.name}: torch.autograd.grad or backward(inputs=...) requested only some gradients, but a replay "
                "accumulates the gradients of all parameters that the graph uses. Call backward() on the whole loss, "
                "or train without graphs (--cuda-graph-impl none)"
            )
        self.owner.before_backward()
        self._launch(self.backward_graph, "backward")
        self.owner.after_backward()
        if after_backward is not None:
            after_backward()
        # Autograd may keep the returned tensors or accumulate into them, so return new ones. ``data`` takes half the
        # time of ``detach``. It does not share version counters, but nothing reads these here.
        results = [grad if grad is None else grad.data for grad in self.grad_inputs]
        for index in self._copied:
            results[index] = results[index].clone()  # type: ignore[union-attr]
        results += [
            grad if grad is None else grad.clone() if clone else grad.data for grad, clone in self._grads_of_params
        ]
        return results

    def _launch(self, graph: Any, phase: str) -> None:
        """Replay ``graph``, inside a range of torch's profiler if it is enabled."""
        if not torch.autograd._profiler_enabled():
            graph.replay()
            return
        with torch.profiler.record_function(f"{self.name} {phase} replay"):
            graph.replay()

    def backward_dw(self) -> None:
        """Replay the weight gradients that the last backward pass delayed, if any.

        As in eager mode, this sets ``grad`` of parameters whose module does not accumulate into ``main_grad``, and runs
        the modules' weight gradient hooks. It runs eagerly if the last call with grad ran eagerly.
        """
        if self._ran_eagerly:
            self._delayed.compute_eagerly()
        elif self.weight_gradient_graph is not None:
            self._launch(self.weight_gradient_graph, "weight gradients")
            self._delayed.hand_out(self._clone_param_grads)

    def name_inputs(self, owner: str, names: Sequence[str], advice: str) -> None:
        """Set the names of the callable and its inputs in errors.

        ``advice`` ends errors about shapes and dtypes.
        """
        if len(names) == len(self._expected):  # nested inputs are numbered
            self._expected.rename(owner, names.__getitem__, advice)
        self.name = owner

    def replace_methods(self, module: torch.nn.Module) -> None:
        """Replace ``module.forward`` with replays, and add ``backward_dw`` and ``reset``; ``reset`` undoes this."""
        self._taken = TakenForward(module, self)
        vars(module).update(reset=self.reset, backward_dw=self.backward_dw)

    def forget_delayed(self) -> None:
        """Discard the delayed weight gradients of a failed pass."""
        self._delayed.forget()

    def reset(self) -> None:
        """Free the graphs and their static tensors."""
        for graph in (self.forward_graph, self.backward_graph, self.weight_gradient_graph):
            if graph is not None:
                graph.reset()
        self.forward_graph = self.backward_graph = self.weight_gradient_graph = self._memory = None
        self.drop_results()
        self.args, self.kwargs, self.inputs = (), {}, ()
        self._places, self._grad_places, self._grads_of_params = [], [], []
        self._delayed = DelayedWeightGradients((), ())
        if self._taken is not None:
            self._taken.end()
            for name in ("reset", "backward_dw"):
                vars(self.func).pop(name, None)
            self._taken = None
        owner, self.owner = self.owner, GraphOwner()
        owner.forget()


def _places_of(tensors: Sequence[torch.Tensor | None]) -> _Places:
    """Return each static tensor with its address and strides, to avoid slow look-ups in replays."""
    return [(each, 0, ()) if each is None else (each, each.data_ptr(), each.stride()) for each in tensors]


def _copy_in(places: _Places, given: Sequence[torch.Tensor | None]) -> None:
    """Copy each given tensor into its static tensor, or zeros for None. Skip static tensors that are None."""
    for (static, address, stride), tensor in zip(places, given):  # noqa: B905, parameters follow inputs
        if static is None:
            continue
        if tensor is None:
            static.zero_()
        elif tensor.data_ptr() != address:
            static.copy_(tensor)
        elif tensor.stride() != stride:
            static.copy_(tensor.clone())


class ReplayNode(torch.autograd.Function):
    """Autograd function of a replay. Arguments: the ``GraphedCallable``, ``after_backward``, inputs, parameters."""

    @staticmethod
    def forward(ctx, graphed, after_backward, *inputs):
        outputs = graphed.replay_forward(inputs)
        ctx.replayed = graphed, after_backward, graphed.round
        ctx.materialize_grads = False
        if graphed.not_differentiable:
            ctx.mark_non_differentiable(*(outputs[i] for i in graphed.not_differentiable))
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        graphed, after_backward, round_ = ctx.replayed
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                f"{graphed.name}: CUDA graphs do not support create_graph=True. Run the callable eagerly for second "
                "derivatives"
            )
        return None, None, *graphed.replay_backward(grads, after_backward, round_, ctx)


_fast_apply: Callable[..., Tensors] = super(torch.autograd.Function, ReplayNode).apply


def capture_passes(
    plan: Plan,
    graphed: Sequence[GraphedCallable],
    *,
    num_warmup_iters: int,
    shares_memory: bool = False,
    pool: tuple | None = None,
    contexts: Iterable[AbstractContextManager] = (),
    before_warmup: Callable[[], Any] | None = None,
    after_warmup: Callable[[], Any] | None = None,
) -> None:
    """Warm up and capture the passes of ``plan``, in replay order.

    Restores RNG states, module buffers and garbage collection. After an exception, no graphs remain.

    Args:
        graphed: The callable of each slot of the plan.
        num_warmup_iters: Number of runs of the whole plan before capture.
        shares_memory: Whether later captures may reuse memory that no later replay reads.
        pool: Memory pool of the graphs; None for a new one.
        contexts: Additional contexts around warm-up and capture.
        before_warmup, after_warmup: Called once each.

    Raises:
        RuntimeError: Autocast caches weights, a gradient is accumulated on the legacy default stream, or an operation
            cannot be captured.
        ValueError: Modules delay weight gradients, but the plan does not compute them.
    """
    if any(map(torch.is_autocast_enabled, ("cuda", "cpu"))) and torch.is_autocast_cache_enabled():
        raise RuntimeError("autocast would cache weights during capture: use torch.autocast(..., cache_enabled=False)")
    modules = [*dict.fromkeys(each.module for each in graphed if each.module is not None)]
    try:
        with ExitStack() as stack:
            for context in (pause_gc(), preserve_rng(), preserve_buffers(modules), *contexts, capture_stream()):
                stack.enter_context(context)
            make_workspaces()
            if before_warmup is not None:
                before_warmup()
            with rebind_buffers(modules):  # graphs must read the original buffers
                for _ in range(num_warmup_iters):
                    run_passes(plan, graphed, WarmUp(), shares_memory)
            if after_warmup is not None:
                after_warmup()
            release_cached_memory()
            run_passes(plan, graphed, Capture(pool), shares_memory)
        for each in graphed:
            each.finish()
    except BaseException:
        for each in graphed:
            each.forget_delayed()
        for each in graphed:
            each.reset()
        raise


def run_passes(plan: Plan, graphed: Sequence[GraphedCallable], capture: Capture | WarmUp, shares_memory: bool) -> None:
    """Run the passes of ``plan`` once; see ``capture_passes``."""
    free: defaultdict[Hashable, deque[Any]] = defaultdict(deque)  # static gradients, first in, first out
    lent: dict[int, tuple[deque[Any], Any]] = {}  # by slot

    def lend(slot: int, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return static gradients for ``outputs`` of ``slot``, reusing tensors that another slot has released."""
        alike = free[tuple((output.shape, output.stride(), output.dtype, output.layout) for output in outputs)]
        grads = alike.popleft() if alike else tuple(map(torch.zeros_like, outputs))
        lent[slot] = alike, grads
        return grads

    last_steps, gradients_read = plan.last_steps(), plan.gradients_read()
    with_weight_gradients = {step.slot for step in plan.steps if step.kind is Pass.WEIGHT_GRADIENTS}
    for step in plan.steps:
        each, kind, is_last = graphed[step.slot], step.kind, step in last_steps
        if kind is not Pass.WEIGHT_GRADIENTS or each.delays_weight_gradients:
            with torch.profiler.record_function(f"{each.name} {kind.value} {capture.phase}"):
                if kind is Pass.FORWARD:
                    each.forward(capture)
                elif kind is Pass.WEIGHT_GRADIENTS:
                    each.weight_gradients(capture)
                elif each.delays_weight_gradients and step.slot not in with_weight_gradients:
                    raise ValueError(
                        f"{each.name} delays its weight gradients: add their pass to _order (-c - 0.5 for chunk c) "
                        "after its backward"
                    )
                else:
                    each.backward(capture, partial(lend, step.slot))
        if kind is Pass.FORWARD and is_last:
            each.detach()
        if isinstance(capture, WarmUp):
            if is_last:
                each.drop_results()
        elif shares_memory and kind is Pass.BACKWARD:
            each.release_outputs()
            for read in gradients_read.get(step, ()):
                graphed[read].release_gradients()
        # If backward returns static gradients unchanged, another slot must not overwrite them before they are read.
        if shares_memory and is_last and step.slot in lent and not each.returns_static_gradients:
            alike, grads = lent.pop(step.slot)
            alike.append(grads)


class DelayedWeightGradients:
    """Weight gradients computed in a separate pass, as with TransformerEngine's ``delay_wgrad_compute``.

    Args:
        modules: Modules with ``need_backward_dw`` and ``backward_dw`` that run in the forward pass.
        params: Parameters that require grad, a superset of the modules' parameters.
    """

    def __init__(self, modules: Iterable[Any], params: Iterable[torch.Tensor]):
        self._modules = tuple(modules)
        self._compute = [module.backward_dw for module in self._modules]  # graphs replace these methods later
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
        """Compute the delayed gradients of the last backward pass within ``recording``, and keep them for replays."""
        # Hide grads, because modules do not replace an existing grad.
        with hide_grads_and_hooks(self._params):
            with recording:
                self.compute_eagerly()
            self._grads = [(param, param.grad) for param in self._params if param.grad is not None]

    def compute_eagerly(self) -> None:
        """Compute the delayed gradients of the last backward pass."""
        for compute in self._compute:
            compute()

    def hand_out(self, clone: bool) -> None:
        """Assign replayed gradients to ``grad`` of parameters (copies with ``clone``), then run weight gradient hooks.

        Parameters of modules that accumulate into ``main_grad`` get no ``grad``.
        """
        for param, grad in self._grads:
            param.grad = grad.clone() if clone else grad
        for notify in self._notify:
            notify()

    def forget(self) -> None:
        """Discard the delayed work of a failed pass, which the next pass would otherwise run."""
        for module in self._modules:
            queue = getattr(getattr(module, "wgrad_store", None), "context", None)  # TransformerEngine's
            while queue is not None and queue.qsize():
                queue.get()


def _delays_weight_gradients(module: Any) -> bool:
    return hasattr(module, "need_backward_dw") and module.need_backward_dw()


def _is_read_later(param: torch.Tensor) -> bool:
    """Return whether a hook reads the gradient of ``param`` after delayed weight gradients are computed.

    TransformerEngine sets ``skip_backward_post_hook`` if its module delays weight gradients. Backward then returns a
    placeholder or a bias gradient, which must not be copied and must stay valid until the hook has read it.
    """
    return getattr(param, "skip_backward_post_hook", False)


@runs_outside_graphs  # not a third-party hook
def _note_parts(ran: dict[torch.nn.Module, None], module: torch.nn.Module, *_: Any) -> None:
    # TransformerEngine's operation sequences and grouped experts run inner modules fused, without calling them.
    fused = hasattr(module, "_module_groups") or getattr(module, "calls_no_inner_modules", False)
    ran.update(dict.fromkeys(module.modules() if fused else (module,)))


def _with_nested(param: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``grad`` plus ``param.grad``, accumulated by a nested backward pass (activation checkpointing)."""
    if param.grad is None:
        return grad
    return param.grad if grad is None else param.grad + grad
