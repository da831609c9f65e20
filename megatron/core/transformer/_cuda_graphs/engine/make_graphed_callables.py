"""``make_graphed_callables``: capture CUDA graphs of several callables at once, with hooks that run outside capture.

The signature matches ``transformer_engine.pytorch.make_graphed_callables`` (2.20), plus ``owners``.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .capture_time_hooks import CaptureTimeHooks
from .captured import GraphedCallable, GraphOwner, capture_passes
from .plan import ordered_plan, separate, share_inputs, signature, unordered_plan
from .quantization import resolve_quantization, transformer_engine_flag


def make_graphed_callables(
    modules: Callable | tuple[Callable, ...],
    sample_args: Sequence,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Sequence[dict[str, Any]] | dict[str, Any] | None = None,
    fp8_enabled: Any = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: Any = None,
    calibrating: bool | None = None,
    recipe: Any = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: Sequence[float] | None = None,
    _num_layers_per_chunk: Sequence[int] | None = None,
    pool: tuple | None = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
    capture_time_hooks: Sequence[Mapping[str, Mapping[Any, Callable]] | None] | None = None,
    owners: Sequence[GraphOwner | None] | None = None,
) -> Any:
    """Capture the forward and backward passes of each callable in CUDA graphs.

    Args:
        modules: A module or a function of tensors, or a tuple of them.
        sample_args: Positional inputs: one tuple of tensors, possibly nested, per callable, or with ``_order`` one per
            callable and micro-batch, sorted by model chunk, then micro-batch, then layer. They become the graphs'
            static inputs. An input is copied if entries in use at the same time share it.
        num_warmup_iters: Number of runs before capture. With 0, graphs include the one-time setup of a first call.
        allow_unused_input: Whether inputs that require grad may have no gradient.
        sample_kwargs: Keyword inputs: one dict of tensors, possibly nested, per entry of ``sample_args``.
        fp8_enabled, fp8_calibrating, fp8_recipe, fp8_group, fp8_weight_caching: megatron-core's names for the next five
            arguments; they take precedence.
        enabled: Whether callables are quantized (FP8, FP4): a bool, or a tuple with one bool per callable. Requires
            TransformerEngine modules.
        calibrating: Whether callables that are not quantized collect statistics.
        recipe: TransformerEngine recipe; None for its default recipe.
        amax_reduction_group: Process group for amax reduction; None for the default group.
        cache_quantized_params: Whether weights are quantized only in the first micro-batch of a step. Each replay then
            requires the keyword ``is_first_microbatch``, a bool.
        _order: The order of passes in warm-up and capture: ``c`` for the forward pass of model chunk ``c`` (counted
            from 1), ``-c`` for its backward pass, ``-c - 0.5`` for the weight gradients that its modules delayed
            (TransformerEngine's ``delay_wgrad_compute``). By default, all forward passes, then all backward passes in
            reverse, each followed by its weight gradients.
        _num_layers_per_chunk: Number of callables of each model chunk.
        pool: Memory pool of the graphs, from ``torch.cuda.graph_pool_handle``. All graphs of a pool must replay in the
            order of their capture.
        retain_graph_in_backward: Whether backward retains the autograd graph.
        _reuse_graph_input_output_buffers: Whether graphs share memory as far as the order of replays permits. Static
            inputs of equal shapes and dtypes, and static gradients of outputs, are reused after their last reader;
            outputs after their backward pass; gradients of inputs and parameters after the next backward pass of the
            chunk (for its first layer, after the next backward pass of any chunk). The caller must consume the results
            of replays before then. Requires ``_order``.
        clone_param_grads_on_return: Whether backward returns copies of parameter gradients. Otherwise, consume each
            gradient before the next replay overwrites it. Gradients of parameters that TransformerEngine marked with
            ``skip_backward_post_hook``, and of inputs that are not leaves, are never copied.
        pre_warmup_hook, post_warmup_hook: Called once, before and after warm-up.
        capture_time_hooks: For each callable, None or ``{kind: {id: hook}}``, with the kinds ``forward_pre_hooks``,
            ``forward_hooks``, ``backward_pre_hooks`` and ``backward_hooks``. The hooks run around the callable's passes
            in every warm-up iteration and in capture, outside the graph, and are not replayed. ``CaptureTimeHooks``
            documents their arguments; TransformerEngine 2.20 passes only the module. Each must return None.
        owners: For each callable, None or the ``GraphOwner`` that consumes the gradients of its parameters.

    Returns:
        With ``_order``, a ``GraphedCallable`` for each entry of ``sample_args``. Otherwise, for each callable, the
        module itself, whose ``forward`` replays until its new method ``reset`` is called, or the ``GraphedCallable`` of
        a function. A tuple if ``modules`` is a tuple. ``backward_dw()`` of each result replays delayed weight
        gradients, if any.

    Raises:
        ValueError: ``modules`` is empty; lengths, orders or quantization arguments do not match; or a module is listed
            twice without ``_order``.
        TypeError: An entry of ``modules`` is not callable, an input or output is not a tensor, a hook is not callable,
            samples or ``capture_time_hooks`` are not nested as above, or quantization is enabled for a function.
        RuntimeError: A module has hooks or trainable buffers; a module or submodule already has graphs; a callable uses
            a parameter that is neither an input nor its module's; autocast caches weights; some modules are in training
            mode and others in evaluation mode; a hook returned a value; a callable writes its inputs; or an operation
            cannot be captured.

    Gradients are computed for a module's inputs and parameters, and only for the inputs of a function. Capture with
    grad enabled for training: calls with grad of a callable that was captured without grad run eagerly. Replays do not
    detect that a parameter was replaced or unfrozen, or autocast or the mode of a submodule changed, since capture.

    Capture restores parameters' ``grad``, buffers, RNG states, garbage collection and TransformerEngine's capture flag.
    A failed capture leaves modules unchanged. Graphs, and modules that replay them, cannot be copied, and gradients of
    replays cannot be differentiated again.
    """
    alone = not isinstance(modules, tuple)
    callables: tuple[Callable, ...] = modules if isinstance(modules, tuple) else (modules,)
    if not callables:
        raise ValueError("modules is empty: pass at least one callable")
    for func in callables:
        if not callable(func):
            raise TypeError(f"modules must be a callable or a tuple of callables, got {type(func).__name__}: {func!r}")
    names = [f"callable {i} ({getattr(func, '__name__', type(func).__name__)})" for i, func in enumerate(callables)]
    named = [(name, func) for name, func in zip(names, callables, strict=True) if isinstance(func, torch.nn.Module)]
    for name, module in named:
        _check_module(name, module)
    modes = {module.training for _, module in named}
    if len(modes) > 1:
        raise RuntimeError("some modules are in training mode and some in evaluation mode: call train() or eval()")
    if _order is not None:
        plan = ordered_plan(_order, _num_layers_per_chunk, len(callables))
    elif len({module for _, module in named}) < len(named):
        raise ValueError("a module is given twice: pass _order to capture a module more than once")
    elif _reuse_graph_input_output_buffers:
        raise ValueError("_reuse_graph_input_output_buffers requires _order: pass it")
    else:
        plan = unordered_plan(len(callables))
    if modes == {False}:
        plan = plan.forward_only()

    slots = range(len(plan.callable_of_slot))
    samples = [sample_args] if alone else sample_args
    keywords: Any = [sample_kwargs or {}] if alone else sample_kwargs or [{}] * len(samples)
    given_hooks = _one_each("capture_time_hooks", capture_time_hooks, callables)
    hooks = [CaptureTimeHooks(name, own) for name, own in zip(names, given_hooks, strict=True)]
    owner_of = _one_each("owners", owners, callables)
    inputs = [
        _checked(names[index], args, kwargs)
        for index, args, kwargs in zip(
            plan.callable_of_slot,
            _one_each("sample_args", samples, slots),
            _one_each("sample_kwargs", keywords, slots),
            strict=True,
        )
    ]
    if _reuse_graph_input_output_buffers:
        inputs = share_inputs(plan, lambda slot: signature(*inputs[slot]), inputs.__getitem__)
    quantization = resolve_quantization(
        callables,
        enabled=enabled if fp8_enabled is None else fp8_enabled,
        calibrating=calibrating if fp8_calibrating is None else fp8_calibrating,
        recipe=recipe if fp8_recipe is None else fp8_recipe,
        amax_reduction_group=amax_reduction_group if fp8_group is None else fp8_group,
        cache_quantized_params=cache_quantized_params if fp8_weight_caching is None else fp8_weight_caching,
    )
    graphed = [
        GraphedCallable(
            names[index],
            callables[index],
            args,
            kwargs,
            owner=owner_of[index],
            quantization=quantization[index],
            hooks=hooks[index],
            allow_unused_input=allow_unused_input,
            retain_graph=retain_graph_in_backward,
            clone_param_grads=clone_param_grads_on_return,
        )
        for index, (args, kwargs) in zip(plan.callable_of_slot, separate(plan, inputs), strict=True)
    ]
    first = quantization[0]
    capture_passes(
        plan,
        graphed,
        num_warmup_iters=num_warmup_iters,
        shares_memory=_reuse_graph_input_output_buffers,
        pool=pool,
        contexts=(nullcontext() if first is None else first.preserve_statistics(callables), transformer_engine_flag()),
        before_warmup=pre_warmup_hook,
        after_warmup=post_warmup_hook,
    )
    results: list[Any] = list(graphed)
    for index, func in enumerate(callables if _order is None else ()):
        if isinstance(func, torch.nn.Module):
            graphed[index].replace_methods(func)
            results[index] = func
    return results[0] if alone else tuple(results)


def _check_module(name: str, module: torch.nn.Module) -> None:
    """Raise RuntimeError if ``module`` already has graphs, or has hooks or a trainable buffer."""
    for child in module.modules():
        if isinstance(vars(child).get("forward"), GraphedCallable):
            raise RuntimeError(
                f"{name} already has graphs, in {type(child).__name__}: call reset() of that module first"
            )
    if module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks:
        raise RuntimeError(
            f"{name} has hooks, which would become part of the graph: remove them before the capture and register them "
            "again afterwards; pass hooks that must run during the capture as capture_time_hooks"
        )
    if any(buffer.requires_grad for buffer in module.buffers()):
        raise RuntimeError(f"{name} has a buffer that requires grad: make it a parameter")


def _checked(name: str, args: Any, kwargs: Any) -> tuple[tuple, dict[str, Any]]:
    """Return a callable's sample inputs as a tuple and a dict; raise TypeError for values other than tensors."""
    if isinstance(args, torch.Tensor):
        raise TypeError(f"sample_args of {name} is a tensor: pass a tuple of tensors, for example (x,)")
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"sample_kwargs of {name} must be a dict, got {kwargs!r}: pass {{}} for no keywords")
    for key, value in (*enumerate(args), *kwargs.items()):
        for leaf in tree_leaves(value):
            if not isinstance(leaf, torch.Tensor):
                raise TypeError(f"sample input {key!r} of {name} contains {leaf!r}: pass tensors only")
    return tuple(args), dict(kwargs)


def _one_each(what: str, given: Any, entries: Sequence[Any]) -> Sequence[Any]:
    """Return the argument ``given``; if it is None, return a list with a None for each of ``entries``.

    Raises:
        TypeError: The argument, called ``what`` in the message, is a dict.
        ValueError: The argument does not have one value per entry.
    """
    if given is None:
        return [None] * len(entries)
    if isinstance(given, Mapping):
        raise TypeError(f"{what} must be a list with one entry per callable, got the dict {given!r}")
    if len(given) != len(entries):
        raise ValueError(f"{what} must have {len(entries)} entries, got {len(given)}")
    return given
