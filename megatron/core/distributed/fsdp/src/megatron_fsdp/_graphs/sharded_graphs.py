"""Graphs of a model under Megatron-FSDP: what can be captured, and captures, which exist only while one is under way.

The registry gets the runners of replays when a capture has succeeded. One that fails leaves no module graphed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .context import Context
from .gradient_sink import UnitSink, has_gradient_hooks
from .pipelines import (
    buckets_of_other_units,
    prepared,
    release_captured,
    take_places,
)
from .recorded_units import RecordedUnits
from .runners import Captured, Facts, Graphed, Planned
from .unit import Unit
from .whole_model import EvaluatedModel, WholeModel

COLLECTIVES_STAY_OUTSIDE = (
    "its collectives cannot be in graphs (that needs --data-parallel-sharding-strategy optim_grads_params, "
    "--fsdp-double-buffer, and no NCCL_GRAPH_MIXING_SUPPORT=0)"
)
# What must be true of no parameter, and the reason. The last does not rule out the whole model, which completes them.
_OF_PARAMETERS: Sequence[tuple[Any, str]] = (
    (has_gradient_hooks, "parameter {} has hooks, or several modules share it"),
    (lambda param: getattr(param, "skip_backward_post_hook", False), "the weight gradient of {} is delayed"),
    (lambda param: getattr(param, "_is_shared", False), "the gradient of {} is completed elsewhere"),
)


class ShardedGraphs:
    """The graphs of one ``MegatronFSDP``: its side of captures.

    Args:
        before, after: Called with a module before and after its backward pass:
            ``FsdpHooks.unshard_for_backward`` and ``release_after_backward``.
    """

    def __init__(self, context: Context, before: Callable[..., object], after: Callable[[torch.nn.Module], object]):
        self._context, self._fsdp = context, context.fsdp
        self._around = before, after

    def recording_blocker(self, modules: Iterable[torch.nn.Module]) -> str:
        """Say why the passes of ``modules`` cannot be recorded with their collectives; empty if they can."""
        units = [self._context.units.get(module) for module in modules]
        return self._blocker(units, [param for unit in units if unit for param in unit.params], _OF_PARAMETERS)

    def whole_model_blocker(self) -> str:
        """Say why the whole model's passes cannot be graphs; empty if they can."""
        if self._fsdp.model_auto_sync:
            return "Megatron-FSDP synchronizes the model in every micro-batch"
        units: list[Unit | None] = [*self._context.units.values()] or [None]
        return self._blocker(units, self._context.backward.trainable, _OF_PARAMETERS[:-1])

    def _blocker(
        self, units: Iterable[Unit | None], params: Iterable[torch.nn.Parameter], reasons: Sequence[Any]
    ) -> str:
        if not all(unit is not None and self._context.plans.records(unit) for unit in units):
            return COLLECTIVES_STAY_OUTSIDE
        for param in params:
            for applies, reason in reasons:
                if applies(param):
                    return str(reason.format(self._fsdp.param_to_name[param]))
        return ""

    def recorded_layers(self, layers: Iterable[torch.nn.Module], begin: Callable[[str], object]) -> RecordedUnits:
        """Return the owner of two graphs that hold the passes of consecutive ``layers``, in the order of forward.

        In the graphs no other unit is prefetched, and outside of them none of these: under the double buffer
        megatron-core prefetches units for units only. ``begin`` is that of ``RecordedUnits``, also below.
        """
        units = {layer: self._context.units[layer] for layer in layers}
        return RecordedUnits(self._context, units, begin, self._context.plans.to_gather(units))

    def whole_model(self, begin: Callable[[str], object]) -> WholeModel:
        """Return the owner of graphs of the whole model's passes."""
        return WholeModel(self._context, begin)

    def evaluated_model(self, begin: Callable[[str], object]) -> EvaluatedModel:
        """Return the owner of a graph of the whole model's forward pass in evaluation; training has graphs, too."""
        return EvaluatedModel(self._context, self._context.registry.whole_model, begin)

    @contextmanager
    def capture_graphs(self, modules: Iterable[torch.nn.Module], keep_buckets: bool = False) -> Iterator[None]:
        """The context in which graphs of ``modules`` are captured, each apart.

        The model has raw parameters, gradients are withheld, no collective is in flight at either end. When the context
        ends, also after an exception, every bucket that capture used is released and the module's parameters are
        restored (raw, or the optimizer's ``DTensor``).

        Args:
            modules: The modules that are captured, each an FSDP unit or one whose parameters are never released.
            keep_buckets: Whether graphs read no experts, and the buckets of all other parameters of ``modules`` keep
                their memory as long as there are graphs.
        """
        context, fsdp, modules = self._context, self._fsdp, list(modules)
        units = {module: context.units[module] for module in modules if module in context.units}
        units = {module: unit for module, unit in units.items() if context.plans.fits(unit)}
        with prepared(fsdp):
            take_places(fsdp)
            facts = {module: _facts(fsdp, module, keep_buckets) for module in modules}
            others = buckets_of_other_units(fsdp, modules)
            captured = {module: Captured(context, module, each, others) for module, each in facts.items()}
            takers = {param: runner for runner in captured.values() for param in runner.module.parameters()}
            with _kept(fsdp, facts.values()), context.registry.capturing(captured):
                context.backward.takers.update(takers)
                try:
                    context.plans.set_up_communicators(units.values())
                    yield
                finally:
                    context.backward.end_of_modules()
                release_captured(fsdp)
                plans = context.plans.make({module: (unit, facts[module].written) for module, unit in units.items()})
        for module, runner in captured.items():
            replays = Graphed(context, module, runner.facts)
            if module in plans:
                replays = Planned(context, module, runner.facts, plans[module])
            if runner.sink is not None:
                runner.sink.runner = replays
            context.registry.graphed[module] = replays

    def gradient_sinks(self, modules: Iterable[torch.nn.Module], whole: bool) -> list[UnitSink | None]:
        """Return for each of ``modules`` what takes its gradients in its backward graph; None for autograd.

        Args:
            modules: Those that are captured, in the context of ``capture_graphs``.
            whole: Whether their graphs hold all that they compute.

        Raises:
            RuntimeError: outside of that context.
        """
        return [self._gradient_sink(module, whole) for module in modules]

    def _gradient_sink(self, module: torch.nn.Module, whole: bool) -> UnitSink | None:
        context = self._context
        runner, unit = context.registry.of(module), context.units.get(module)
        if not isinstance(runner, Captured):
            raise RuntimeError("gradients are taken for graphs that are being captured: call it in capture_graphs()")
        if unit is None or not context.plans.fits(unit) or any(map(has_gradient_hooks, unit.params)):
            return None
        runner.facts.whole = whole
        runner.sink = sink = UnitSink(context, module, runner.facts, *self._around)
        return sink

    def expect_evaluation(self, prepare: Callable[[tuple, dict[str, Any]], object]) -> None:
        """Call ``prepare`` once, before the next forward pass of the model in evaluation mode and without grad.

        It gets the positional arguments and the keyword arguments of the pass.
        """
        self._fsdp.fsdp_hooks.before_evaluation.append(prepare)

    def recorded_collectives(self) -> int:
        """Return how many graphs hold all-gathers or reductions alone, beside those of layers."""
        return self._context.plans.recorded_collectives()

    def forget_graphs(self, modules: Iterable[torch.nn.Module]) -> None:
        """Let ``modules`` train eagerly from now on, and free what was recorded for them."""
        for module in modules:
            runner = self._context.registry.graphed.pop(module, None)
            if isinstance(runner, Planned):
                self._context.plans.forget(runner.plan.unit.buckets)
            if isinstance(runner, Graphed):
                self._fsdp.param_and_grad_buffer.keep_weights(runner.facts.kept, False)
        self._fsdp.param_and_grad_buffer.leave_graphs()


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
    fsdp.param_and_grad_buffer.keep_weights(kept, True)
    try:
        yield
    except BaseException:
        fsdp.param_and_grad_buffer.keep_weights(kept, False)
        raise
