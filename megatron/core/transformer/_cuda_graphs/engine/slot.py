"""The capture of one callable for one micro-batch: its static tensors, its hooks and its graphs."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import itemgetter
from types import MethodType
from typing import Any, Protocol

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_structure, tree_unflatten

from . import sanitizer
from .capture_time_hooks import CaptureTimeHooks
from .connected_leaves import connected_leaves
from .delayed_wgrad import DelayedWeightGradients, delays_weight_gradients
from .memory import PoolMemory, storage_address, weak_reference
from .plan import Pass
from .preserve import allow_nested_backward, hide_grads_and_hooks
from .quantization import QuantizedReplay
from .replay import AroundBackward, CapturedGraphs, Replay, ReplayOrder, Tensors
from .sanitizer import CapturedTensor, Sanitizer, captured, captured_of
from .streams import refuse_legacy_stream

Recording = Callable[[torch.cuda.CUDAGraph | None], AbstractContextManager]
Grads = Sequence[torch.Tensor | None]


class GradientSink(AroundBackward, Protocol):
    """Takes the gradients of one callable's parameters inside its backward graph.

    Autograd hands each gradient to a node and the hooks of its parameter, in every backward pass. What is taken here
    costs the host nothing at a replay, and the graph's memory for it is free for the next graph.
    """

    def take(self, params: Sequence[torch.Tensor], grads: Grads) -> Grads:
        """Called once, while the backward graph is recorded; what it computes is a part of the graph.

        Args:
            params: The parameters that require grad.
            grads: Their gradients; None for a parameter that the callable does not use.

        Returns:
            ``grads`` with None in place of each gradient that was taken; the others go to autograd.
        """


@dataclass
class WarmupRecord:
    """What earlier passes have shown of a function. Callables for other micro-batches of it may share it.

    Attributes:
        ran: The modules that ran in the first forward pass; None before it.
        backward_ran: Whether a backward pass ran, on a stream that can be captured.
    """

    ran: tuple[torch.nn.Module, ...] | None = None
    backward_ran: bool = False


class SlotCapture(CapturedGraphs):
    """The graphs of a callable for one micro-batch, with the static tensors around them.

    Args:
        args: Static positional inputs; nested structures of tensors.
        kwargs: Static keyword inputs; nested structures of tensors.
        hooks: What runs around it in warm-up and capture.
        allow_unused_input: Whether an input that requires grad may get none.
        retain_graph: Whether backward keeps the autograd graph.
        clone_param_grads: Whether backward returns copies of parameter gradients rather than the static ones. Those of
            parameters with ``skip_backward_post_hook`` it never copies.
        autocast: Makes the context in which ``func`` runs in warm-up and capture.
        quantized: What its replays do for quantization; None where it is not quantized.
        module: The module whose parameters and submodules a function uses; None for ``module_of(func)``.
        keep_param_grads: Takes the parameters and their gradients (None for a parameter without) and returns what the
            backward graph is to return of them; what it computes is recorded. None to return them all.
        gradient_sink: Takes gradients of the parameters in the backward graph; None for no one. Not together with
            ``keep_param_grads``.
        warmup_record: What passes of the same function have shown before.

    Attributes:
        quantized: The argument; None after ``reset``.
        weight_gradient_graph: Computes the weight gradients that backward delays; None where it delays none.
    """

    def __init__(
        self,
        name: str,
        func: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        hooks: CaptureTimeHooks | None = None,
        allow_unused_input: bool = False,
        retain_graph: bool = False,
        clone_param_grads: bool = True,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        quantized: QuantizedReplay | None = None,
        module: torch.nn.Module | None = None,
        keep_param_grads: Callable[[Grads, Grads], Grads] | None = None,
        gradient_sink: GradientSink | None = None,
        warmup_record: WarmupRecord | None = None,
    ):
        super().__init__(name)
        self.func = func
        self.hooks = hooks or CaptureTimeHooks(name, None)
        self.args, self.kwargs = args, kwargs
        self.inputs, self._structure = self._flatten_inputs(args, kwargs)
        self._module = module_of(func) if module is None else module
        self._all_params: tuple[torch.Tensor, ...] = () if self._module is None else tuple(self._module.parameters())
        self.params = tuple(param for param in self._all_params if param.requires_grad)
        self._keep_param_grads = keep_param_grads if gradient_sink is None else gradient_sink.take
        self._gradient_sink = gradient_sink
        self._allow_unused_input, self._retain_graph = allow_unused_input, retain_graph
        self._clone_param_grads = clone_param_grads
        self._autocast = autocast
        self.quantized = quantized
        self._delayed = DelayedWeightGradients((), ())
        self._warmup = warmup_record or WarmupRecord()
        if self._warmup.ran is not None:
            self._look_for_delays_and_statistics(self._warmup.ran)

        self.weight_gradient_graph: torch.cuda.CUDAGraph | None = None
        self._nest: Callable[[Tensors], Any] = tuple  # makes of flattened outputs what ``func`` returned
        self._memory: PoolMemory | None = None

    def _flatten_inputs(self, args, kwargs) -> tuple[tuple[torch.Tensor, ...], TreeSpec | None]:
        for key, value in kwargs.items():
            for leaf in tree_leaves(value):
                if not isinstance(leaf, torch.Tensor):
                    raise TypeError(f"sample_kwargs of {self.name}: {key!r} holds {leaf!r}, which is not a tensor")
        leaves, structure = flat((*args, *kwargs.values()))
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(f"sample_args of {self.name} hold {leaf!r}, which is not a tensor")
        return tuple(leaves), structure

    def forward(self, recording: Recording, graph: torch.cuda.CUDAGraph | None = None) -> None:
        """Run the forward pass on the static inputs, hooks around it, recorded by ``recording(graph)``."""
        self.hooks.run("forward_pre_hooks", self.func, self.args, self.kwargs)
        with self._noting_modules_that_run(), recording(graph), self._autocast():
            output = self.func(*self.args, **self.kwargs)
        self.hooks.run("forward_hooks", self.func, self.args, output)
        outputs, spec = tree_flatten(output)
        if isinstance(output, torch.Tensor):
            self._nest = itemgetter(0)
        else:
            is_tuple = spec == tree_structure(tuple(outputs))
            self._nest = tuple if is_tuple else partial(tree_unflatten, treespec=spec)
        for leaf in outputs:
            if leaf is not None and not isinstance(leaf, torch.Tensor):
                raise TypeError(f"{self.name} returned {leaf!r}, which is neither a tensor nor None")
        self.outputs = tuple(outputs)
        self.differentiable = tuple(_requires_grad(leaf) for leaf in outputs)
        self.forward_graph = graph

    @contextmanager
    def _noting_modules_that_run(self) -> Iterator[None]:
        """In the first forward pass, find the modules that run: some delay weight gradients, or hold statistics."""
        if self._warmup.ran is not None or self._module is None:
            yield
            return
        ran: dict[torch.nn.Module, None] = {}
        with ExitStack() as stack:
            for module in self._module.modules():
                stack.callback(module.register_forward_hook(partial(_note_parts, ran)).remove)
            yield
        self._warmup.ran = tuple(ran)
        self._look_for_delays_and_statistics(self._warmup.ran)

    def _look_for_delays_and_statistics(self, ran: Sequence[torch.nn.Module]) -> None:
        self._delayed = DelayedWeightGradients(filter(delays_weight_gradients, ran), self._all_params)
        if self.quantized is not None:
            for module in ran:
                self.quantized.note(module)

    def backward(
        self,
        recording: Recording,
        new_grads: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
        graph: torch.cuda.CUDAGraph | None = None,
    ) -> None:
        """Run the backward pass of the last ``forward``, hooks around it, recorded by ``recording(graph)``.

        Args:
            new_grads: Makes static gradients for the given outputs.

        Raises:
            RuntimeError: an input that requires grad got none, and unused inputs are not allowed; an output depends on
                a parameter that is neither an input nor the module's; or gradients arrive on the legacy default stream.
        """
        outputs = [output for output in self.outputs if _requires_grad(output)]
        self.hooks.run("backward_pre_hooks", self.func)
        if outputs:
            inputs = [tensor for tensor in self.inputs if tensor.requires_grad]
            leaves = (*inputs, *self.params)
            grad_outputs = new_grads(outputs)
            if self._warmup.backward_ran:
                check: AbstractContextManager = nullcontext()
            else:
                self._refuse_other_parameters(outputs, leaves)
                check = refuse_legacy_stream(self.name, leaves)
            with hide_grads_and_hooks(self._all_params), check, allow_nested_backward(), recording(graph):
                grads = torch.autograd.grad(
                    outputs, leaves, grad_outputs, retain_graph=self._retain_graph, allow_unused=True
                )
                param_grads: Grads = tuple(map(_with_nested, self.params, grads[len(inputs) :]))
                used = [grad is not None for grad in param_grads]
                if graph is not None and self._keep_param_grads is not None:
                    param_grads = self._keep_param_grads(self.params, param_grads)
            self._warmup.backward_ran = True
            if graph is not None:  # hooks of a parameter that gets no gradient must not run at replay
                self.params, param_grads = tuple(compress(self.params, used)), tuple(compress(param_grads, used))
            self._keep_gradients(grad_outputs, grads[: len(inputs)], param_grads)
            self.backward_graph = graph
        self.hooks.run("backward_hooks", self.func)
        if not self._retain_graph:
            self.detach_outputs()

    def _refuse_other_parameters(self, outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
        """Refuse what accumulates gradients elsewhere than in ``leaves``: a replay would lose them.

        Raises:
            RuntimeError: gives the shape of such a parameter.
        """
        known = set(map(id, leaves))
        for leaf in connected_leaves(outputs, stops=leaves):
            # Modules may make leaves in forward.
            if id(leaf) not in known and (self._module is None or isinstance(leaf, torch.nn.Parameter)):
                raise RuntimeError(
                    f"{self.name} uses a tensor of shape {tuple(leaf.shape)} that requires grad and is neither an "
                    "input nor a parameter of its module, so its gradient would be lost: give the module that it "
                    "belongs to, or give it as an input"
                )

    def detach_outputs(self) -> None:
        """Let go of autograd's nodes and what they saved; from here on only the memory of the outputs is needed."""
        self.outputs = tuple(output if output is None else output.detach() for output in self.outputs)

    def _keep_gradients(self, grad_outputs, input_grads, param_grads) -> None:
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

    def weight_gradients(self, recording: Recording, graph: torch.cuda.CUDAGraph | None = None) -> None:
        """Compute the weight gradients that the last ``backward`` delayed, recorded by ``recording(graph)``."""
        self._delayed.compute(partial(recording, graph))
        self.weight_gradient_graph = graph

    def forget_delayed(self) -> None:
        """Drop what a failed pass left for ``backward_dw``, which the next one would take for its own."""
        self._delayed.forget()

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

    def release_grad_outputs(self) -> None:
        """Let later captures use the memory of the outputs' static gradients, unless someone else keeps it."""
        self.grad_outputs = tuple(grad if grad is None else weak_reference(grad) for grad in self.grad_outputs)

    def release_inputs(self) -> None:
        """Let later captures use the memory of the static inputs, unless someone else keeps it."""
        leaves, structure = tree_flatten((self.args, self.kwargs))
        self.inputs = tuple(map(weak_reference, leaves))
        self.args, self.kwargs = tree_unflatten(self.inputs, structure)

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

    def finish[R: Replay](self, make: Callable[..., R] = Replay) -> R:  # type: ignore[assignment]
        """Make ready to replay, once everything is captured, by what ``make`` makes of the graphs, and return it."""
        self._warmup = WarmupRecord()
        if self._gradient_sink is not None:
            self._leave_taken_gradients_out()
        made = make(
            self,
            self.inputs,
            clone_param_grads=[
                self._clone_param_grads and not _read_later(param) for param, _ in self._params_and_grads()
            ],
            around_backward=self._gradient_sink,
        )
        if sanitizer.requested() and self.forward_graph is not None:
            made.sanitizer = Sanitizer(self.name, self._captured_tensors(), self.forward_graph.pool())
        self._replay = made
        return made

    def _captured_tensors(self) -> list[CapturedTensor]:
        """What the graphs use, as far as it is known."""
        found = captured_of(self._module)
        for what, tensors in (
            ("input", self.inputs),
            ("output", self.outputs),
            ("gradient of output", self.grad_outputs),
            ("gradient of input", self.grad_inputs),
            ("gradient of parameter", self.grad_params),
        ):
            found += captured((f"{what} {i}", tensor) for i, tensor in enumerate(tensors))
        return [*found, *getattr(self._gradient_sink, "captured", ())]

    def _leave_taken_gradients_out(self) -> None:
        """Give autograd only the parameters whose gradients it gets, and a leaf that gets none.

        For that leaf it runs the backward pass even if no input requires grad. A parameter in its place would have its
        hooks called, without a gradient.
        """
        returned = [(param, grad) for param, grad in self._params_and_grads() if grad is not None]
        if self.params:
            returned.append((torch.empty(0, device=self.params[0].device, requires_grad=True), None))
        self.params = tuple(param for param, _ in returned)
        self.grad_params = tuple(grad for _, grad in returned)

    def take_turn(self, order: ReplayOrder, kind: Pass) -> None:
        """Take the next number in ``order`` for the pass that has just been recorded."""
        self.order = order
        if kind is Pass.FORWARD:
            self.forward_turn = order.number(self.name)
        elif not self._retain_graph:
            self.backward_turn = order.number(self.name)

    def reset(self) -> None:
        super().reset()
        if self.weight_gradient_graph is not None:
            self.weight_gradient_graph.reset()
        self.weight_gradient_graph = self._memory = self.quantized = None
        self._delayed = DelayedWeightGradients((), ())
        self.hooks, self._autocast = CaptureTimeHooks(self.name, None), nullcontext
        self.args, self.kwargs, self.inputs, self.params, self._all_params = (), {}, (), (), ()
        self._warmup = WarmupRecord()
        self._gradient_sink = self._keep_param_grads = None


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


def flat(inputs: tuple) -> tuple[Sequence[Any], TreeSpec | None]:
    """The leaves of ``inputs`` and how they are nested: None for a tuple of tensors, which is the usual case."""
    if all(isinstance(item, torch.Tensor) for item in inputs):
        return inputs, None
    return tree_flatten(inputs)


def _requires_grad(output: torch.Tensor | None) -> bool:
    return output is not None and output.requires_grad
