"""``make_graphed_callables``: CUDA graphs of several callables at once, with hooks that run outside capture.

The signature is that of ``transformer_engine.pytorch.make_graphed_callables`` (2.20), so that the engines take the
same arguments, and one more.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from .capture_time_hooks import CaptureTimeHooks
from .captured import GraphedCallable, GraphOwner, capture_passes, module_of
from .plan import distinct, keep_apart, ordered_plan, share_inputs, signature, unordered_plan
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
    _num_layers_per_chunk: Sequence[int] | int | None = None,
    pool: tuple | None = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], Any] | None = None,
    post_warmup_hook: Callable[[], Any] | None = None,
    capture_time_hooks: Sequence[Mapping[str, Mapping[Any, Callable]] | None] | None = None,
    owners: Sequence[GraphOwner | None] | None = None,
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
        fp8_enabled, fp8_calibrating, fp8_recipe, fp8_group, fp8_weight_caching: megatron-core's spellings of the next
            five, which they win over.
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
        owners: For each callable None, or who takes the gradients of its parameters; see ``GraphOwner``.

    Returns:
        With ``_order`` a ``GraphedCallable`` for each entry of ``sample_args``. Without it, for each callable: a module
        itself, whose ``forward`` replays until its new method ``reset`` is called, or a function's ``GraphedCallable``.
        A tuple if ``modules`` is one. If weight gradients are delayed, ``backward_dw()`` of the returned object replays
        them; otherwise it does nothing.

    Raises:
        ValueError: lengths, orders or quantization arguments do not fit, or a module is given twice without ``_order``.
        TypeError: an entry of ``modules`` is not callable, an input or output is not a tensor, a hook is not callable,
            ``sample_kwargs`` or ``capture_time_hooks`` are not nested as above, or a function is to be quantized.
        RuntimeError: a module has hooks or trainable buffers; it or a submodule has graphs already; a callable uses a
            parameter that is neither an input nor its module's; autocast caches weights; modules are in different
            modes; a hook returned a value; or something in a callable cannot be captured.

    The parameters of a module get gradients, also if the callable is a bound method of it or a ``functools.partial``
    over either. For other functions only inputs do.

    Capture restores parameters' ``grad``, buffers, RNG, garbage collection and TransformerEngine's capture flag. A
    failed capture leaves modules as they were. Graphs, and modules that replay them, cannot be copied, and gradients of
    replays cannot be differentiated again.
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
    names = [f"callable {i} ({getattr(func, '__name__', type(func).__name__)})" for i, func in enumerate(callables)]
    samples = [sample_args] if alone else list(sample_args)
    keywords: list[Any] = [sample_kwargs or {}] if alone else list(sample_kwargs or [{}] * len(samples))
    _refuse_unfit(names, callables)
    training = _training_mode(callables)
    if _order is None:
        _refuse_duplicates(names, callables)
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

    given_hooks = _one_each("capture_time_hooks", capture_time_hooks, callables)
    hooks = [CaptureTimeHooks(name, own) for name, own in zip(names, given_hooks, strict=True)]
    owner_of = _one_each("owners", owners, callables)
    quantization = resolve_quantization(
        callables,
        enabled=enabled if fp8_enabled is None else fp8_enabled,
        calibrating=calibrating if fp8_calibrating is None else fp8_calibrating,
        recipe=recipe if fp8_recipe is None else fp8_recipe,
        amax_reduction_group=amax_reduction_group if fp8_group is None else fp8_group,
        cache_quantized_params=cache_quantized_params if fp8_weight_caching is None else fp8_weight_caching,
    )
    inputs = [distinct(tuple(args), dict(kwargs)) for args, kwargs in zip(samples, keywords, strict=True)]
    if _reuse_graph_input_output_buffers:
        inputs = share_inputs(plan, lambda slot: signature(*inputs[slot]), inputs.__getitem__)
    if training:
        inputs = keep_apart(plan, inputs)
    graphed = [
        GraphedCallable(
            names[index],
            callables[index],
            args,
            kwargs,
            owner=owner_of[index],
            quantized=quantization[index].new_replay() if quantization else None,
            context=quantization[index].autocast if quantization else nullcontext,
            hooks=hooks[index],
            allow_unused_input=allow_unused_input,
            retain_graph=retain_graph_in_backward,
            clone_param_grads=clone_param_grads_on_return,
        )
        for index, (args, kwargs) in zip(plan.callable_of_slot, inputs, strict=True)
    ]
    statistics = quantization[0].preserve_statistics(callables) if quantization else nullcontext()
    capture_passes(
        plan,
        graphed,
        num_warmup_iters=num_warmup_iters,
        training=training,
        shares_memory=_reuse_graph_input_output_buffers,
        pool=pool,
        contexts=(statistics, transformer_engine_flag()),
        before_warmup=pre_warmup_hook,
        after_warmup=post_warmup_hook,
    )
    results: list[Any] = list(graphed)
    for index, func in enumerate(callables if _order is None else ()):
        if isinstance(func, torch.nn.Module):
            graphed[index].replace_methods(func)
            results[index] = func
    return results[0] if alone else tuple(results)


def _refuse_unfit(names: Sequence[str], callables: Sequence[Callable]) -> None:
    """Refuse callables whose passes cannot be captured by themselves."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("make_graphed_callables cannot be called while the current stream is capturing")
    for name, func in zip(names, callables, strict=True):
        owner = module_of(func)
        for child in () if owner is None else owner.modules():
            if isinstance(vars(child).get("forward"), GraphedCallable):
                raise RuntimeError(
                    f"{name} has graphs already, in {type(child).__name__}, and a graph cannot be captured in another: "
                    "call its reset() before"
                )
        if not isinstance(func, torch.nn.Module):
            continue
        if func._forward_pre_hooks or func._forward_hooks or func._backward_pre_hooks or func._backward_hooks:
            raise RuntimeError(
                f"{name} has hooks, which would become part of the graph. Take them away and give those that must run "
                "at capture as capture_time_hooks; they can be registered again afterwards."
            )
        if any(buffer.requires_grad for buffer in func.buffers()):
            raise RuntimeError(f"{name} has a buffer that requires grad; only parameters may be trainable")


def _refuse_duplicates(names: Sequence[str], callables: Sequence[Callable]) -> None:
    first: dict[int, int] = {}
    for index, func in enumerate(callables):
        if isinstance(func, torch.nn.Module) and first.setdefault(id(func), index) != index:
            raise ValueError(
                f"{names[index]} is callable {first[id(func)]} too: a module has one graph, whose memory a second call "
                "in a step would overwrite. Give it once, or with _order, which returns a graph for each entry"
            )


def _training_mode(callables: Sequence[Callable]) -> bool:
    modes = {func.training for func in callables if isinstance(func, torch.nn.Module)}
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
