"""One callable and micro-batch as a pair of CUDA graphs: its static tensors, its hooks, its capture and its replay."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron.core.transformer.cuda_graph_hooks import HOOK_KINDS

Recording = Callable[[torch.cuda.CUDAGraph | None], AbstractContextManager]


class CaptureTimeHooks:
    """The hooks that run around one callable in warm-up and capture, outside the graph.

    Args:
        name: What errors call the callable.
        hooks: ``{kind: {id: hook}}`` with the kinds of ``HOOK_KINDS``; None for no hooks.

    Forward-pre hooks are offered ``(module, args, kwargs)``, forward hooks ``(module, args, output)``, the others
    ``(module)``. A hook that takes one argument only gets the module.

    Raises:
        ValueError: an unknown kind.
        TypeError: a hook that cannot be called.
    """

    def __init__(self, name: str, hooks: Mapping[str, Mapping[Any, Callable]] | None):
        self._name = name
        self._hooks: dict[str, list[tuple[Callable, bool]]] = {kind: [] for kind in HOOK_KINDS}
        for kind, entries in (hooks or {}).items():
            if kind not in HOOK_KINDS:
                raise ValueError(f"capture_time_hooks of {name}: unknown key {kind!r}; the keys are {HOOK_KINDS}")
            for key, hook in entries.items():
                if not callable(hook):
                    raise TypeError(f"capture_time_hooks of {name}: {kind}[{key!r}] is not callable: {hook!r}")
                self._hooks[kind].append((hook, kind.startswith("forward") and _takes(hook, 3)))

    def run(self, kind: str, module: Callable, *offered: Any) -> None:
        """Call the hooks of one kind, in order.

        Raises:
            RuntimeError: a hook returned something; what it wants to change is in no graph.
        """
        for hook, takes_all in self._hooks[kind]:
            if (hook(module, *offered) if takes_all else hook(module)) is not None:
                culprit = getattr(hook, "__wrapped__", hook)
                raise RuntimeError(
                    f"capture_time_hooks of {self._name}: {kind} hook {culprit!r} returned a value. Hooks run outside "
                    "the graph and cannot change what it reads or returns; they must return None."
                )


def _takes(hook: Callable, count: int) -> bool:
    try:
        inspect.signature(hook, follow_wrapped=False).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


class GraphedCallable:
    """A callable, for one micro-batch, that replays its CUDA graphs.

    It is called as the callable was, with tensors of the same shapes and dtypes, and takes part in autograd. What it
    returns lives in the graphs' memory until the next replay of a graph that shares it.

    Args:
        name: What errors and profiles call it.
        func: The module or function.
        args: Static positional inputs; nested structures of tensors.
        kwargs: Static keyword inputs; nested structures of tensors.
        hooks: What runs around it in warm-up and capture.
        allow_unused_input: Whether an input that requires grad may get none.
        retain_graph: Whether backward keeps the autograd graph.
        clone_param_grads: Whether backward returns copies of parameter gradients rather than the static ones.

    Attributes:
        eager: The function, or the module's ``forward`` as it was, which runs without graphs.
        params: The parameters that get a gradient.
        differentiable: For each output whether it takes part in autograd.
        forward_graph: Runs the forward pass; None before capture and after ``reset``.
        backward_graph: Runs the backward pass; None where nothing requires grad.
        weight_gradient_graph: Computes the weight gradients that backward delays; None where it delays none.
    """

    def __init__(
        self,
        name: str,
        func: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        hooks: CaptureTimeHooks,
        *,
        allow_unused_input: bool = False,
        retain_graph: bool = False,
        clone_param_grads: bool = True,
    ):
        self.name = name
        self.func = func
        self.hooks = hooks
        self.args, self.kwargs = args, kwargs
        self.inputs = self._flatten_inputs(args, kwargs)
        self._expected = [(tensor.shape, tensor.dtype) for tensor in self.inputs]
        self.training = getattr(func, "training", None)
        self.params: tuple[torch.Tensor, ...] = ()
        if isinstance(func, torch.nn.Module):
            self.params = tuple(param for param in func.parameters() if param.requires_grad)
        self.forward_graph: torch.cuda.CUDAGraph | None = None
        self.backward_graph: torch.cuda.CUDAGraph | None = None
        self.weight_gradient_graph: torch.cuda.CUDAGraph | None = None
        self._delaying: tuple[Any, ...] | None = None
        self._delayed_grads: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.eager = func.forward if isinstance(func, torch.nn.Module) else func
        self._allow_unused_input = allow_unused_input
        self._retain_graph = retain_graph
        self._clone_param_grads = clone_param_grads
        self._knows_params = False
        self.differentiable: tuple[bool, ...] = ()
        self._outputs: tuple[torch.Tensor | None, ...] = ()
        self._output_spec: TreeSpec | None = None
        self._returns_one_tensor = False
        self._grad_outputs: tuple[torch.Tensor | None, ...] = ()
        self._grad_inputs: tuple[torch.Tensor | None, ...] = ()

    def _flatten_inputs(self, args, kwargs) -> tuple[torch.Tensor, ...]:
        leaves, _ = tree_flatten(args)
        for key, value in kwargs.items():
            values, _ = tree_flatten(value)
            for leaf in values:
                if not isinstance(leaf, torch.Tensor):
                    raise TypeError(f"sample_kwargs of {self.name}: {key!r} holds {leaf!r}, which is not a tensor")
            leaves += values
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(f"sample_args of {self.name} hold {leaf!r}, which is not a tensor")
        return tuple(leaves)

    # ------------------------------------------------------------------------------------- warm-up and capture

    def forward(self, recording: Recording, graph: torch.cuda.CUDAGraph | None = None) -> None:
        """Run the forward pass on the static inputs, hooks around it, recorded by ``recording(graph)``."""
        self.hooks.run("forward_pre_hooks", self.func, self.args, self.kwargs)
        with self._noting_delaying_modules(), recording(graph):
            output = self.func(*self.args, **self.kwargs)
        self.hooks.run("forward_hooks", self.func, self.args, output)
        outputs, self._output_spec = tree_flatten(output)
        self._returns_one_tensor = isinstance(output, torch.Tensor)
        for leaf in outputs:
            if leaf is not None and not isinstance(leaf, torch.Tensor):
                raise TypeError(f"{self.name} returned {leaf!r}, which is neither a tensor nor None")
        self._outputs = tuple(outputs)
        self.differentiable = tuple(_requires_grad(leaf) for leaf in outputs)
        self.forward_graph = graph

    def backward(
        self,
        recording: Recording,
        new_grads: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
        graph: torch.cuda.CUDAGraph | None = None,
    ) -> None:
        """Run the backward pass of the last ``forward``, hooks around it, recorded by ``recording(graph)``.

        Args:
            recording: The context in which autograd runs.
            new_grads: Makes static gradients for the given outputs.
            graph: The graph to record into.

        Raises:
            RuntimeError: an input that requires grad got none, and unused inputs are not allowed; or the backward pass
                accumulates gradients by a backward pass of its own.
        """
        outputs = [output for output in self._outputs if _requires_grad(output)]
        self.hooks.run("backward_pre_hooks", self.func)
        if outputs:
            inputs = [tensor for tensor in self.inputs if tensor.requires_grad]
            grad_outputs = new_grads(outputs)
            with self._no_gradients_on_the_side(), recording(graph):
                grads = torch.autograd.grad(
                    outputs,
                    (*inputs, *self.params),
                    grad_outputs,
                    retain_graph=self._retain_graph,
                    allow_unused=True,
                )
            self._keep_gradients(inputs, grad_outputs, grads)
            self.backward_graph = graph
        self.hooks.run("backward_hooks", self.func)
        if not self._retain_graph:  # from here on only the storages are needed, not autograd's nodes
            self._outputs = tuple(output if output is None else output.detach() for output in self._outputs)

    @property
    def delays_weight_gradients(self) -> bool:
        """Whether modules that ran in ``forward`` leave their weight gradients to a pass of their own."""
        return bool(self._delaying)

    @contextmanager
    def _noting_delaying_modules(self) -> Iterator[None]:
        """Find, in the first forward pass, the modules that run and delay their weight gradients.

        They are those with ``need_backward_dw`` and ``backward_dw``, as TransformerEngine's have.
        """
        if self._delaying is not None or not isinstance(self.func, torch.nn.Module):
            yield
            return
        ran: dict[Any, None] = {}
        able = [module for module in self.func.modules() if hasattr(module, "need_backward_dw")]
        handles = [module.register_forward_hook(lambda module, *_: ran.setdefault(module)) for module in able]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._delaying = tuple(module for module in ran if module.need_backward_dw())

    def weight_gradients(self, recording: Recording, graph: torch.cuda.CUDAGraph | None = None) -> None:
        """Compute the weight gradients that the last ``backward`` delayed, recorded by ``recording(graph)``."""
        params = list(self.func.parameters())  # type: ignore[attr-defined]
        before = [param.grad for param in params]
        with recording(graph):
            for module in self._delaying or ():
                module.backward_dw()
        changed = [(param, grad) for param, grad in zip(params, before, strict=True) if param.grad is not grad]
        self._delayed_grads = [(param, param.grad) for param, _ in changed if param.grad is not None]
        for param, grad in changed:
            param.grad = grad
        self.weight_gradient_graph = graph

    def forget_delayed(self) -> None:
        """Drop what a failed pass left for ``backward_dw``, which the next one would take for its own."""
        for module in self._delaying or ():
            while module.wgrad_store.context.qsize():  # TransformerEngine's queue
                module.wgrad_store.context.get()

    @contextmanager
    def _no_gradients_on_the_side(self) -> Iterator[None]:
        """Refuse a backward pass that runs another one inside, whose gradients a replay would lose.

        Activation checkpointing does so (``megatron.core.tensor_parallel.checkpoint``).
        """
        params = [] if not isinstance(self.func, torch.nn.Module) else list(self.func.parameters())
        before = [param.grad for param in params]
        yield
        touched = [param for param, grad in zip(params, before, strict=True) if param.grad is not grad]
        for param, grad in zip(params, before, strict=True):
            param.grad = grad
        if touched:
            raise RuntimeError(
                f"the backward pass of {self.name} accumulated gradients of {len(touched)} parameters by a backward "
                "pass of its own, as activation checkpointing does. Capture it with TransformerEngine's "
                "make_graphed_callables, or without recomputing modules that have parameters (--recompute-modules)."
            )

    def _keep_gradients(self, inputs, grad_outputs, grads) -> None:
        input_grads, param_grads = grads[: len(inputs)], grads[len(inputs) :]
        if not self._allow_unused_input and any(grad is None for grad in input_grads):
            unused = next(i for i, grad in enumerate(input_grads) if grad is None)
            raise RuntimeError(
                f"{self.name} does not use input {unused} of those that require grad; allow_unused_input=True permits "
                "it"
            )
        if not self._knows_params:
            # Hooks of a parameter that gets no gradient must not run at replay.
            used = [(param, grad) for param, grad in zip(self.params, param_grads, strict=True) if grad is not None]
            self.params, param_grads = tuple(param for param, _ in used), tuple(grad for _, grad in used)
            self._knows_params = True
        remaining = iter(grad_outputs)
        self._grad_outputs = tuple(
            next(remaining) if differentiable else None for differentiable in self.differentiable
        )
        remaining = iter(input_grads)
        self._grad_inputs = (
            *(next(remaining) if tensor.requires_grad else None for tensor in self.inputs),
            *param_grads,
        )

    # -------------------------------------------------------------------------------------------------- replay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the graphs on ``args`` and ``kwargs``.

        Keywords that the graph was not captured with are ignored; ``cuda_graph_stream`` and ``cuda_graph_event`` name
        the stream to replay on and the event that ends it. A module in the other mode (training or evaluation) than at
        capture runs eagerly.

        Raises:
            RuntimeError: after ``reset``.
            TypeError: an input that the graph was captured with is missing, or is not a tensor.
            ValueError: a tensor is not like the captured one.
        """
        if self.forward_graph is None:
            raise RuntimeError(f"the graphs of {self.name} were reset; capture them again to replay them")
        stream, event = kwargs.pop("cuda_graph_stream", None), kwargs.pop("cuda_graph_event", None)
        if self.training is not None and self.func.training != self.training:  # type: ignore[attr-defined]
            return self.eager(*args, **kwargs)
        inputs = self._match_inputs(args, kwargs)
        outputs = _Replay.apply(self, stream, event, *inputs, *self.params)
        return outputs[0] if self._returns_one_tensor else tree_unflatten(outputs, self._output_spec)

    def _match_inputs(self, args, kwargs) -> list[torch.Tensor]:
        inputs = _leaves(args)
        for key in self.kwargs:
            if key not in kwargs:
                raise TypeError(f"{self.name} was captured with the keyword {key!r}, which this call does not give")
            inputs += _leaves((kwargs[key],))
        if len(inputs) != len(self._expected):
            raise TypeError(f"{self.name} was captured with {len(self.inputs)} tensors, this call gives {len(inputs)}")
        for i, given in enumerate(inputs):
            shape, dtype = self._expected[i]
            if not isinstance(given, torch.Tensor):
                raise TypeError(f"input {i} of {self.name} was captured as a tensor, this call gives {given!r}")
            if given.shape != shape or given.dtype != dtype:
                raise ValueError(
                    f"input {i} of {self.name} was captured as {tuple(shape)} {dtype}, this call gives "
                    f"{tuple(given.shape)} {given.dtype}"
                )
        return inputs

    def replay_forward(self, inputs, stream, event) -> tuple[torch.Tensor | None, ...]:
        """Copy ``inputs`` to their static places and run the forward graph."""
        for static, given in zip(self.inputs, inputs, strict=False):
            if static.data_ptr() != given.data_ptr():
                static.copy_(given)
        with self._phase("forward"):
            _run(self.forward_graph, stream, event)
        return tuple(output if output is None else output.detach() for output in self._outputs)

    def replay_backward(self, grads, stream, event) -> tuple[torch.Tensor | None, ...]:
        """Copy the outputs' gradients to their static places and run the backward graph."""
        if self.backward_graph is None:
            raise RuntimeError(f"{self.name} has no backward graph: it was captured without grad, or reset")
        for static, given in zip(self._grad_outputs, grads, strict=True):
            if static is None:
                continue
            if given is None:
                static.zero_()
            elif static.data_ptr() != given.data_ptr():
                static.copy_(given)
        with self._phase("backward"):
            _run(self.backward_graph, stream, event)
        num_inputs = len(self.inputs)
        grads = [grad if grad is None else grad.detach() for grad in self._grad_inputs]
        if self._clone_param_grads:
            grads[num_inputs:] = [grad.clone() for grad in grads[num_inputs:]]
        return tuple(grads)

    def _phase(self, name: str) -> AbstractContextManager:
        """Show a replay in a profile; where none is taken it costs next to nothing."""
        if torch.autograd._profiler_enabled():
            return torch.profiler.record_function(f"{self.name} {name} replay")
        return nullcontext()

    def backward_dw(self) -> None:
        """Replay the weight gradients that the last backward pass delayed; nothing where it delays none.

        As in eager mode, a module that does not accumulate into ``main_grad`` sets ``grad`` of its parameters. The
        hooks that modules run after their weight gradients run.

        Raises:
            RuntimeError: after ``reset``.
        """
        if self.forward_graph is None:
            raise RuntimeError(f"the graphs of {self.name} were reset; capture them again to replay them")
        if self.weight_gradient_graph is None:
            return
        with self._phase("weight gradients"):
            self.weight_gradient_graph.replay()
        for param, grad in self._delayed_grads:
            param.grad = grad.clone() if self._clone_param_grads else grad
        for module in self._delaying or ():
            module._trigger_wgrad_accumulation_and_reduce_hooks()

    def reset(self) -> None:
        """Free the graphs and every tensor they own. The callable can no longer be replayed."""
        for graph in (self.forward_graph, self.backward_graph, self.weight_gradient_graph):
            if graph is not None:
                graph.reset()
        self.forward_graph = self.backward_graph = self.weight_gradient_graph = None
        self._delaying, self._delayed_grads = None, []
        self.args, self.kwargs, self.inputs, self.params = (), {}, (), ()
        self._outputs = self._grad_outputs = self._grad_inputs = ()


class _Replay(torch.autograd.Function):
    """Replays a ``GraphedCallable`` with autograd: its backward replays the backward graph."""

    @staticmethod
    def forward(ctx, graphed, stream, event, *inputs):
        ctx.graphed, ctx.stream, ctx.event = graphed, stream, event
        ctx.set_materialize_grads(False)
        outputs = graphed.replay_forward(inputs, stream, event)
        ctx.mark_non_differentiable(
            *(
                output
                for output, differentiable in zip(outputs, graphed.differentiable, strict=True)
                if output is not None and not differentiable
            )
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return (None, None, None, *ctx.graphed.replay_backward(grads, ctx.stream, ctx.event))


def _run(graph, stream, event) -> None:
    current = torch.cuda.current_stream()
    if stream is None or stream == current:
        graph.replay()
        return
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        graph.replay()
    if event is None:
        current.wait_stream(stream)
    else:
        current.wait_event(event)


def _leaves(inputs: tuple) -> list[Any]:
    """Flatten ``inputs``; a tuple of tensors, which is the usual case, without the cost of a tree."""
    if all(isinstance(item, torch.Tensor) for item in inputs):
        return list(inputs)
    return tree_flatten(inputs)[0]


def _requires_grad(output: torch.Tensor | None) -> bool:
    return output is not None and output.requires_grad
