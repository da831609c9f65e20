"""Captures of layers: what exists only while one is under way.

The registry gets the runners of replays when a capture has succeeded. One that fails leaves no module graphed.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .capture_buckets import CaptureBuckets
from .context import Context
from .gradient_sink import UnitSink, has_gradient_hooks
from .pipelines import prepared, prepared_for_evaluation, release_captured
from .runners import Captured, Evaluated, Facts, Graphed, Planned


@contextmanager
def capture_layers(context: Context, modules: Iterable[torch.nn.Module], keep_buckets: bool) -> Iterator[None]:
    """Keep the model in capture mode: raw parameters, gradients withheld, no collective in flight at either end.

    When the context ends, also after an exception, every bucket that capture used is released and the module's
    parameters are restored (raw, or the optimizer's ``DTensor``).

    Args:
        modules: The modules that are captured, each an FSDP unit or one whose parameters are never released.
        keep_buckets: Whether graphs read no experts, and the buckets of all other parameters of ``modules`` keep
            their memory as long as there are graphs.
    """
    fsdp, modules = context.fsdp, list(modules)
    units = {module: context.units[module] for module in modules if module in context.units}
    units = {module: unit for module, unit in units.items() if context.plans.fits(unit)}
    with prepared(fsdp):
        facts = {module: _facts(fsdp, module, keep_buckets) for module in modules}
        buckets = CaptureBuckets(fsdp, modules)
        captured = {module: Captured(context, module, each, buckets) for module, each in facts.items()}
        takers = {param: runner for runner in captured.values() for param in runner.module.parameters()}
        with _kept(fsdp, facts.values()), context.registry.capturing(captured):
            context.backward.takers.update(takers)
            try:
                context.plans.set_up_communicators(units.values())
                yield
            finally:
                context.backward.end_of_modules()
            buckets.free_gradients()
            release_captured(fsdp)
            plans = context.plans.make({module: (unit, facts[module].written) for module, unit in units.items()})
    for module, runner in captured.items():
        replays = Graphed(context, module, runner.facts)
        if module in plans:
            replays = Planned(context, module, runner.facts, plans[module])
        if runner.sink is not None:
            runner.sink.runner = replays
        context.registry.graphed[module] = replays


def _facts(fsdp: Any, module: torch.nn.Module, keep_buckets: bool) -> Facts:
    params = list(module.parameters())
    shards_params = fsdp.data_parallel_sharding_strategy == "optim_grads_params"
    if not keep_buckets or not (shards_params and isinstance(module, tuple(fsdp.fsdp_unit_modules))):
        return Facts(params)
    buffer = fsdp.param_and_grad_buffer
    buckets = {param: buffer.param_to_param_group[param] for param in params}
    read = [param for param in params if not buffer.parameter_groups[buckets[param]].is_expert_param]
    return Facts(read, kept=frozenset(buckets[param] for param in read))


@contextmanager
def _kept(fsdp: Any, facts: Iterable[Facts]) -> Iterator[None]:
    """Let buckets keep their memory from now on, but not after an exception."""
    kept = frozenset(bucket for each in facts for bucket in each.kept)
    try:
        if kept:
            fsdp.param_and_grad_buffer.keep_weights(kept, True)
        yield
    except BaseException:
        if kept:
            fsdp.param_and_grad_buffer.keep_weights(kept, False)
        raise


def gradient_sink(
    context: Context,
    module: torch.nn.Module,
    whole: bool,
    before: Callable[..., object],
    after: Callable[[torch.nn.Module], object],
) -> UnitSink | None:
    """Return what takes the gradients of ``module`` in its backward graph; None if autograd has to handle them.

    Args:
        whole: Whether its graphs hold all that it computes.

    Raises:
        RuntimeError: the module is not being captured.
    """
    runner, unit = context.registry.of(module), context.units.get(module)
    if not isinstance(runner, Captured):
        raise RuntimeError("gradients are taken for graphs that are being captured: call it in capture_graphs()")
    if unit is None or not context.plans.fits(unit) or any(map(has_gradient_hooks, unit.params)):
        return None
    runner.facts.whole = whole
    runner.sink = sink = UnitSink(context, module, runner.facts, before, after)
    return sink


@contextmanager
def capture_evaluation(context: Context, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Keep the model in capture mode for graphs of forward passes of ``modules`` in evaluation."""
    fsdp, modules = context.fsdp, list(modules)
    with prepared_for_evaluation(fsdp):
        read = {module: params_of(context, module) for module in modules}
        buckets = CaptureBuckets(fsdp, modules)
        with context.registry.capturing({module: Evaluated(context, module, read[module], buckets) for module in read}):
            yield
    context.registry.evaluated.update({module: Evaluated(context, module, read[module]) for module in read})


def params_of(context: Context, module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that are gathered for the graphs of ``module``, be they for evaluation only."""
    runner = context.registry.graphed.get(module)
    return list(module.parameters()) if runner is None else runner.params


def forget(context: Context, modules: Iterable[torch.nn.Module]) -> None:
    """Let ``modules`` train eagerly from now on, and free what was recorded for them."""
    for module in modules:
        runner = context.registry.graphed.pop(module, None)
        if isinstance(runner, Planned):
            context.plans.forget(runner.plan.unit)
        if isinstance(runner, Graphed) and runner.facts.kept:
            context.fsdp.param_and_grad_buffer.keep_weights(runner.facts.kept, False)
