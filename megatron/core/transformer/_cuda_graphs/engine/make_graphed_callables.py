"""``make_graphed_callables``: CUDA graphs of several callables at once, with hooks that run outside capture.

The signature is that of ``transformer_engine.pytorch.make_graphed_callables`` (2.20), so that the engines take the
same arguments, and one more.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from .capture import Capture, capturing
from .capture_time_hooks import CaptureTimeHooks
from .graphed_slot import GraphedSlot
from .memory import release_cached_memory
from .passes import run_passes
from .plan import ordered_plan, unordered_plan
from .preserve import preserve_buffers, rebind_buffers
from .quantization import one_spelling, resolve_quantization
from .slot import GradientSink, module_of
from .static_inputs import distinct, keep_apart, share_inputs, signature
from .te_engine import transformer_engine_flag


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
    _num_layers_per_chunk: Sequence[int] | int | None = None,
    pool: tuple | None = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
    capture_time_hooks: Sequence[Mapping[str, Mapping[Any, Callable]] | None] | None = None,
    gradient_sinks: Sequence[GradientSink | None] | None = None,
) -> Any:
    """Capture forward and backward of each callable in CUDA graphs.

    Args:
        modules: A module or function of tensors, or a tuple of them.
        sample_args: Positional inputs, a tuple of tensors for each callable, or with ``_order`` for each callable and
            micro-batch: by model chunk, then micro-batch, then layer. They become the graphs' static inputs; one that
            requires grad and is given for several entries at a time is copied for each.
        num_warmup_iters: How often everything runs before capture. With 0, the setup in a callable's first call is
            captured too.
        allow_unused_input: Whether an input that requires grad may get no gradient.
        sample_kwargs: Keyword inputs, one dict for each entry of ``sample_args``.
        fp8_enabled, fp8_calibrating, fp8_recipe, fp8_group, fp8_weight_caching: Deprecated spellings of the next five.
        enabled: Whether callables are quantized (FP8, FP4); a bool, or a tuple with one for each callable. Needs
            TransformerEngine, whose modules do it.
        calibrating: Whether callables that are not quantized collect the statistics for it.
        recipe: TransformerEngine's recipe; its default one if None.
        amax_reduction_group: The process group over which amaxes are reduced; None for the default group.
        cache_quantized_params: Whether weights are quantized in a step's first micro-batch only: each replay then needs
            the keyword ``is_first_microbatch``, a bool.
        _order: The order of passes: ``c`` for the forward of model chunk ``c`` (counted from 1), ``-c`` for its
            backward, ``-c - 0.5`` for the weight gradients that its modules delayed (``delay_wgrad_compute`` of
            TransformerEngine's). Without it all forwards, then all backwards in reverse, each with its weight
            gradients. Warm-up follows the same order.
        _num_layers_per_chunk: How many callables each model chunk holds.
        pool: The memory pool of the graphs, from ``torch.cuda.graph_pool_handle``.
        retain_graph_in_backward: Whether backward keeps autograd's graph.
        _reuse_graph_input_output_buffers: Whether graphs share memory, as far as replays in the order of ``_order``
            permit: static inputs of the same structure, and static gradients of outputs, once the last pass that reads
            them is over; outputs after their backward pass, or in evaluation mode where it would be; gradients of
            inputs and parameters after the next backward pass of the chunk (those of its first layer after the next
            backward pass of any chunk). The caller must consume what replays return before that. Needs ``_order``.
        clone_param_grads_on_return: Whether backward returns copies of the parameters' gradients. Otherwise the next
            replay overwrites them, so each must be consumed before. The same always holds for gradients of parameters
            that TransformerEngine has marked with ``skip_backward_post_hook``, and for gradients of inputs, except
            leaves, of which backward returns copies.
        pre_warmup_hook, post_warmup_hook: Called once, before and after warm-up.
        capture_time_hooks: For each callable None or ``{kind: {id: hook}}``, with the kinds ``forward_pre_hooks``,
            ``forward_hooks``, ``backward_pre_hooks`` and ``backward_hooks``. They run around the callable's passes in
            every warm-up iteration and in capture, outside the graph, and are not replayed. See ``CaptureTimeHooks``
            for what each is called with; each must return None.
        gradient_sinks: For each callable None, or who takes the gradients of its parameters; see ``GradientSink``.

    Returns:
        With ``_order`` a ``GraphedSlot`` for each entry of ``sample_args``. Without it, for each callable: a module
        itself, whose ``forward`` now replays, or a function's ``GraphedSlot``. A tuple if ``modules`` is one.
        If weight gradients are delayed, ``backward_dw()`` of the returned object replays them; otherwise it does
        nothing.

    Raises:
        ValueError: lengths, orders or quantization arguments do not fit, or a module is given twice without ``_order``.
        TypeError: an entry of ``modules`` is not callable, an input or output is not a tensor, a hook is not callable,
            ``sample_kwargs`` or ``capture_time_hooks`` are not nested as above, or a function is to be quantized.
        RuntimeError: a module has hooks or trainable buffers; it or a submodule has graphs already; a callable uses a
            parameter that is neither an input nor its module's; autocast caches weights; modules are in different
            modes; a hook returned a value; or something in a callable cannot be captured.

    The parameters of a module get gradients, also if the callable is a bound method of it or a ``functools.partial``
    over either. For other functions only inputs do.

    A deep copy of a module runs eagerly and can be captured; the graphs themselves cannot be copied.

    Capture restores parameters' ``grad``, buffers, RNG, garbage collection and TransformerEngine's capture flag. A
    failed capture leaves modules as they were, except that those whose graphs were reset have their own methods again.
    """
    if torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled():
        raise RuntimeError("capture under autocast needs torch.autocast(..., cache_enabled=False)")
    if num_warmup_iters < 0:
        raise ValueError(f"num_warmup_iters must not be negative, got {num_warmup_iters}")

    alone = not isinstance(modules, tuple)
    callables: tuple[Callable, ...] = modules if isinstance(modules, tuple) else (modules,)
    for func in callables:
        if not callable(func):
            raise TypeError(f"modules must be a callable or a tuple of callables, got {type(func).__name__}: {func!r}")
    samples = [sample_args] if alone else list(sample_args)
    keywords: list[Any] = [sample_kwargs or {}] if alone else list(sample_kwargs or [{}] * len(samples))
    _refuse_unfit(callables)
    training = _training_mode(callables)
    if _order is None:
        _refuse_duplicates(callables)
        if _reuse_graph_input_output_buffers:
            raise ValueError("_reuse_graph_input_output_buffers needs _order")
        plan = unordered_plan(len(callables))
    else:
        plan = ordered_plan(_order, _num_layers_per_chunk, len(callables))
    for what, given in (("sample_args", samples), ("sample_kwargs", keywords)):
        if len(given) != len(plan.callable_of_slot):
            raise ValueError(f"{what} must have {len(plan.callable_of_slot)} entries, got {len(given)}")
    if not all(isinstance(entry, Mapping) for entry in keywords):
        raise TypeError(f"sample_kwargs must hold a dict for each entry of sample_args, got {sample_kwargs!r}")

    hooks = [
        CaptureTimeHooks(_name(callables[index], index), given)
        for index, given in enumerate(_one_each("capture_time_hooks", capture_time_hooks, callables))
    ]
    sinks = _one_each("gradient_sinks", gradient_sinks, callables)
    quantization = resolve_quantization(
        callables,
        enabled=one_spelling(enabled=enabled, fp8_enabled=fp8_enabled),
        calibrating=one_spelling(calibrating=calibrating, fp8_calibrating=fp8_calibrating),
        recipe=one_spelling(recipe=recipe, fp8_recipe=fp8_recipe),
        amax_reduction_group=one_spelling(amax_reduction_group=amax_reduction_group, fp8_group=fp8_group),
        cache_quantized_params=one_spelling(
            cache_quantized_params=cache_quantized_params, fp8_weight_caching=fp8_weight_caching
        ),
    )
    inputs = [distinct(tuple(args), dict(kwargs)) for args, kwargs in zip(samples, keywords, strict=True)]
    if _reuse_graph_input_output_buffers:
        inputs = share_inputs(plan, lambda slot: signature(*inputs[slot]), inputs.__getitem__)
    if training:
        inputs = keep_apart(plan, inputs)
    for module in callables:  # whose graphs were reset
        graphed_before = _graph_of(module)
        if graphed_before is not None:
            _swap_methods(module, graphed_before.replaced)
    slots = [
        GraphedSlot(
            _name(callables[index], index),
            callables[index],
            args,
            kwargs,
            hooks=hooks[index],
            allow_unused_input=allow_unused_input,
            retain_graph=retain_graph_in_backward,
            clone_param_grads=clone_param_grads_on_return,
            autocast=quantization[index].autocast if quantization else nullcontext,
            quantized=quantization[index].new_replay() if quantization else None,
            gradient_sink=sinks[index],
        )
        for index, (args, kwargs) in zip(plan.callable_of_slot, inputs, strict=True)
    ]
    run = functools.partial(run_passes, plan, slots, training, _reuse_graph_input_output_buffers)
    statistics = quantization[0].preserve_statistics(callables) if quantization else nullcontext()
    with_buffers = [module for module in map(module_of, callables) if module is not None]
    try:
        with capturing(preserve_buffers(with_buffers), statistics, transformer_engine_flag()):
            if pre_warmup_hook is not None:
                pre_warmup_hook()
            with rebind_buffers(with_buffers):  # the graphs read the buffers that are there at replay
                for _ in range(num_warmup_iters):
                    run(None)
            if post_warmup_hook is not None:
                post_warmup_hook()
            release_cached_memory()
            run(Capture(pool))
        for slot in slots:
            slot.finish()
    except BaseException:
        for slot in slots:
            slot.forget_delayed()
        for slot in slots:
            slot.reset()
        raise

    graphed = tuple(slots) if _order is not None else tuple(_graph_in_place(slot) for slot in slots)
    return graphed[0] if alone else graphed


# The attributes that a module's graphs replace.
_METHODS = ("forward", "reset", "backward_dw", "__deepcopy__")


def _graph_of(module: Callable) -> GraphedSlot | None:
    """The ``GraphedSlot`` that ``_graph_in_place`` put on a module, or None."""
    forward = getattr(module, "__dict__", {}).get("forward")
    return forward if isinstance(forward, GraphedSlot) else None


def _refuse_unfit(callables: Sequence[Callable]) -> None:
    """Refuse callables whose passes cannot be captured by themselves."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("make_graphed_callables cannot be called while the current stream is capturing")
    for index, module in enumerate(callables):
        own, owner = _name(module, index), module_of(module)
        for name, child in () if owner is None else owner.named_modules():
            graphed = _graph_of(child)
            if graphed is None or graphed.forward_graph is None:
                continue
            if child is module:
                raise RuntimeError(f"{own} has graphs already: call its reset() before capturing it again")
            raise RuntimeError(
                f"{own} contains {name or type(child).__name__}, which has graphs already, and a graph cannot be "
                "captured in another: call reset() of the inner one before"
            )
        if not isinstance(module, torch.nn.Module):
            continue
        if module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks:
            raise RuntimeError(
                f"{own} has hooks, which would become part of the graph. Take them away and give those that must run "
                "at capture as capture_time_hooks; they can be registered again afterwards."
            )
        if any(buffer.requires_grad for buffer in module.buffers()):
            raise RuntimeError(f"{own} has a buffer that requires grad; only parameters may be trainable")


def _refuse_duplicates(callables: Sequence[Callable]) -> None:
    first: dict[int, int] = {}
    for index, module in enumerate(callables):
        if isinstance(module, torch.nn.Module) and first.setdefault(id(module), index) != index:
            raise ValueError(
                f"{_name(module, index)} is callable {first[id(module)]} too: a module has one graph, whose memory a "
                "second call in a step would overwrite. Give it once, or with _order, which returns a graph for each "
                "entry"
            )


def _swap_methods(module: Callable, methods: Mapping[str, Any]) -> dict[str, Any]:
    """Let ``module`` have these ``_METHODS`` of its own and no others; return those that it had."""
    own = {name: vars(module).pop(name) for name in _METHODS if name in vars(module)}
    vars(module).update(methods)
    return own


def _training_mode(callables: Sequence[Callable]) -> bool:
    modes = {module.training for module in callables if isinstance(module, torch.nn.Module)}
    if len(modes) > 1:
        raise RuntimeError("modules must be all in training or all in evaluation mode")
    return modes != {False}


def _one_each[Given](
    what: str, given: Sequence[Given | None] | None, callables: Sequence[Callable]
) -> list[Given | None]:
    """Check an argument that has an entry for each callable, or is None."""
    if given is None:
        return [None] * len(callables)
    if isinstance(given, Mapping):
        raise TypeError(f"{what} must be a list with one entry for each callable, got the dict {given!r}")
    if len(given) != len(callables):
        raise ValueError(f"{what} must have one entry for each of {len(callables)} callables: {len(given)}")
    return list(given)


def _name(module: Callable, index: int) -> str:
    return f"callable {index} ({getattr(module, '__name__', type(module).__name__)})"


def _graph_in_place(slot: GraphedSlot) -> Any:
    module = slot.func
    if not isinstance(module, torch.nn.Module):
        return slot
    slot.watch_parameters(module)
    copied = functools.partial(_deepcopy_without_graphs, module)
    own = dict(zip(_METHODS, (slot, slot.reset, slot.backward_dw, copied), strict=True))
    slot.replaced = _swap_methods(module, own)
    return module


def _deepcopy_without_graphs(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """Copy ``module`` with its own methods: graphs and their memory can be neither copied nor shared."""
    graphed = _graph_of(module)
    if graphed is None:  # forward was replaced since
        raise RuntimeError(f"{type(module).__name__} has CUDA graphs and cannot be copied: its forward was replaced")
    replacing = _swap_methods(module, graphed.replaced)
    try:
        return copy.deepcopy(module, memo)
    finally:
        _swap_methods(module, replacing)
