"""Watches a capture on rank 0, shows how far it is, and reports on it afterwards."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch

from ..engine.plan import Pass, Plan
from ..hooks import ModuleHooks, hooks_on, must_run_outside
from ..layer_graph import static_inputs
from ..report.page import write
from ..report.record import (
    BACKWARD,
    FORWARD,
    KINDS,
    WEIGHT_GRADIENTS,
    BufferUse,
    CaptureReport,
    EagerPart,
    HookRoute,
    LayerRecord,
    StaticInput,
    total,
)
from ..report.table import table
from ..report.timeline import Planned, Timeline
from .decoder_graphs import DecoderGraphs
from .layers import language_layers, layer_name, why_not_graphable
from .sample_inputs import SampleArguments
from .stage import Stage
from .stage_graphs import StageGraphs, graphs_of, pools_of

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

WITHHELD, RECORDED = "withheld", "recorded"
_KIND = {Pass.FORWARD: FORWARD, Pass.BACKWARD: BACKWARD, Pass.WEIGHT_GRADIENTS: WEIGHT_GRADIENTS}


def _only_warns(method: Callable[..., None]) -> Callable[..., None]:
    """Let a ``method`` that fails warn, and report nothing: what was captured is worth more than the report on it."""

    @wraps(method)
    def run(self: "CaptureObserver", *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.timeline = self._report = None
            logger.warning("there will be no report on CUDA graphs", exc_info=error)

    return run


class CaptureObserver:
    """Watches one capture of ``stage``, unless this is another rank than 0.

    Args:
        number: Which capture of the stage it is, counted from 1; later ones have files of their own.

    Attributes:
        timeline: What the capture is to be noted in; None for nothing.
    """

    def __init__(self, stage: Stage, number: int):
        self._stage = stage
        self._name = stage.role.report if number == 1 else f"{stage.role.report}_{number}"
        watches = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        self.timeline = Timeline() if watches else None
        self._plan = Plan((), ())
        self._report: CaptureReport | None = None

    def start(self) -> None:
        """Say that the capture begins, with cached memory released."""
        if self.timeline is not None:
            self.timeline.sample("start")

    def expect(self, plan: Plan, names: Sequence[str], warmup_iters: int) -> None:
        """Say which passes will be captured, of callables with these ``names``, after as many iterations of warm-up."""
        if self.timeline is not None:
            self._plan = plan
            with_hooks = [step for step in self._planned() if step[2] != WEIGHT_GRADIENTS]
            self.timeline.expect(with_hooks, names, warmup_iters)

    def _planned(self, first: int = 0) -> list[Planned]:
        """The steps of the plan, each with its layer, counted from ``first``, micro-batch and kind."""
        places = enumerate(self._plan.slots_of_callables, first)
        of_slot = {slot: (layer, number) for layer, slots in places for number, slot in enumerate(slots)}
        return [(*of_slot[step.slot], _KIND[step.kind]) for step in self._plan.steps]

    def passes_end(self) -> None:
        """Say that the engine has run the last pass."""
        if self.timeline is not None:
            self.timeline.end()

    @_only_warns
    def captured_layers(
        self,
        layers: Sequence[Sequence[torch.nn.Module]],
        names: Sequence[str],
        graphs: Sequence[Any],
        samples: Sequence[SampleArguments],
        decoder: DecoderGraphs | None = None,
    ) -> None:
        """Report on graphs of layers. Hooks must be in place again.

        Args:
            layers: The layers of each model chunk that the engine has captured.
            graphs: What the engine returned for each slot of the plan.
            decoder: The graphs of layers that were captured together, before the others.
        """
        timeline = self.timeline
        if timeline is None:
            return
        together = [] if decoder is None else list(decoder.module.layers)
        first = len(together)  # of the others
        records = [
            LayerRecord(layer_name(layer, index), 0, 1, total([]), recorded_with=0)
            for index, layer in enumerate(together)
        ]
        order = self._planned(first)
        inputs = static_inputs_of(self._plan, graphs, samples, order, first)
        if decoder is not None:
            records[0] = replace(self._record(records[0].name, 0, [decoder.passes], None), recorded_with=0)
            order = [(index, 0, FORWARD) for index in range(first)] + order
            order += [(index, 0, BACKWARD) for index in reversed(range(first))]
            use = BufferUse(0, 0, 0, len(order) - 1)
            inputs += [StaticInput(name, each.nbytes, [use]) for name, each in decoder.passes.inputs.items()]
        chunks = [chunk for chunk, own in enumerate(layers) for _ in own]
        for index, slots in enumerate(self._plan.slots_of_callables):
            records.append(self._record(names[index], chunks[index], [graphs[slot] for slot in slots], index))
        self._report = self._new_report(
            [*([] if decoder is None else [decoder.passes]), *graphs],
            layers=records,
            order=order,
            passes=[replace(step, layer=0 if step.layer is None else first + step.layer) for step in timeline.passes],
            static_inputs=inputs,
            hooks=hook_routes(together, recorded=True) + hook_routes([layer for own in layers for layer in own], first),
        )

    def _record(self, name: str, chunk: int, graphs: Sequence[Any], timed_as: int | None) -> LayerRecord:
        """Return what is known of a layer, or of a chunk as a whole, whose passes have this number in the timeline."""
        assert self.timeline is not None
        return LayerRecord(
            name,
            chunk,
            len(graphs),
            total(list(map(graph_counts, graphs))),
            warm_up_seconds=self.timeline.warm_up_seconds[timed_as],
            capture_seconds=sum(step.seconds for step in self.timeline.passes if step.layer == timed_as),
        )

    @_only_warns
    def captured_models(self, slots: Sequence[Sequence[Any]], names: Sequence[str]) -> None:
        """Report on graphs of the whole model, or of its chunks.

        Args:
            slots: The ``WholePasses`` of each chunk, one for each micro-batch.
        """
        self.passes_end()
        if self.timeline is None:
            return
        order = self._planned()
        self._report = self._new_report(
            [passes for own in slots for passes in own],
            whole_model=True,
            order=order or [(None, 0, FORWARD), (None, 0, BACKWARD)],
            layers=[
                self._record(name, chunk, own, chunk)
                for chunk, (name, own) in enumerate(zip(names, slots, strict=True))
                if order
            ],
        )

    def _new_report(self, graphs: Sequence[Any], whole_model: bool = False, **fields: Any) -> CaptureReport:
        timeline = self.timeline
        assert timeline is not None
        return CaptureReport(
            "native",
            whole_model,
            graphs=total(list(map(graph_counts, graphs))),
            seconds={
                "warm_up": sum(timeline.warm_up_seconds.values()),
                "capture": sum(step.seconds for step in timeline.passes),
                "waiting": timeline.waited,
            },
            pools=pools_of(graphs),
            **({"passes": timeline.passes} | fields),
        )

    @_only_warns
    def finish(self, graphs: StageGraphs, whole_model_refused: str) -> None:
        """Log the report, and write it, if layers or a model were captured. Cached memory must have been released.

        Args:
            graphs: What there is of the stage now.
            whole_model_refused: Why the whole model was not captured; empty if --cuda-graph-layers-per-graph says so.
        """
        timeline, self.timeline = self.timeline, None
        if timeline is None or self._report is None:
            return
        timeline.sample("end")
        end = timeline.samples[-1].time - timeline.samples[0].time
        wrappers = [chunk.fsdp for chunk in self._stage.chunks if chunk.fsdp is not None]
        report = replace(
            self._report,
            memory=timeline.samples,
            seconds={"total": end, **self._report.seconds},
            collectives=sum(fsdp.graphs.recorded_collectives() for fsdp in wrappers),
            eager=list(eager_parts(self._stage, graphs, whole_model_refused)),
        )
        logger.info(table(report))
        folder = getattr(self._stage.config, "cuda_graph_report", None)
        if folder is None:
            return
        try:
            pages = write(report, folder, self._name)
        except OSError as error:
            logger.warning(f"the report on CUDA graphs could not be written (--cuda-graph-report): {error}")
        else:
            logger.info(f"wrote the report on CUDA graphs to {' and '.join(map(str, pages))}")


def graph_counts(graphed: Any) -> dict[str, int | None]:
    """Count the graphs of an engine's callable, or of whole passes, by kind; None where it does not show them."""
    if not hasattr(graphed, "forward_graph"):  # TransformerEngine's
        return dict.fromkeys(KINDS)
    return dict(zip(KINDS, [int(graph is not None) for graph in graphs_of(graphed)], strict=True))


def static_inputs_of(
    plan: Plan, graphs: Sequence[Any], samples: Sequence[SampleArguments], planned: Sequence[Planned], start: int = 0
) -> list[StaticInput]:
    """Return each static input with its uses.

    Args:
        plan: The order in which passes were captured, and are replayed.
        graphs: What the engine returned for each slot of ``plan``.
        samples: The static inputs that the engine was given.
        planned: The steps of ``plan`` with layer and micro-batch.
        start: How many other steps come before them.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, step in enumerate(plan.steps, start):
        if step.kind is Pass.FORWARD:
            first[step.slot] = place
        last[step.slot] = place
    found: dict[int, StaticInput] = {}
    for slot in sorted(first, key=first.__getitem__):
        layer, micro_batch, _ = planned[first[slot] - start]
        assert layer is not None
        for name, tensor in static_inputs(graphs[slot], *samples[slot]):
            buffer = found.setdefault(tensor.data_ptr(), StaticInput(name, tensor.nbytes))
            buffer.uses.append(BufferUse(layer, micro_batch, first[slot], last[slot]))
    return list(found.values())


def hook_routes(layers: Sequence[torch.nn.Module], first: int = 0, recorded: bool = False) -> list[HookRoute]:
    """Return where the hooks on and in ``layers``, counted from ``first``, go.

    Args:
        recorded: Whether all of them are recorded, with the layers in one graph, and not each layer by itself.
    """
    routes: list[HookRoute] = []
    for index, layer in enumerate(layers, first):
        for kind, hooks in ModuleHooks.of(layer).capture_time_hooks().items() if not recorded else ():
            routes += [
                HookRoute(index, "", _hook_name(getattr(hook, "__wrapped__", hook)), kind) for hook in hooks.values()
            ]
        for path, module in layer.named_modules():
            around_graph = not (path or recorded)
            for hook in hooks_on(module):
                outside = must_run_outside(hook)
                if not (around_graph and outside):  # listed above
                    route = WITHHELD if around_graph or (outside and not recorded) else RECORDED
                    routes.append(HookRoute(index, path, _hook_name(hook), route))
    return routes


def _hook_name(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def eager_parts(stage: Stage, graphs: StageGraphs, whole_model_refused: str) -> Iterator[EagerPart]:
    """Say what has no graphs, and why, though layers of ``stage``, or all of it, have; see ``CaptureObserver``."""
    if graphs.models:
        what = "calls without labels or with tensors of other shapes"
        yield EagerPart(what, "graphs of the whole model do not fit them")
    else:
        yield from _beside_layers(stage, whole_model_refused)
    if not graphs.models:
        yield EagerPart("evaluation", "only whole models have a graph for it")


def _beside_layers(stage: Stage, whole_model_refused: str) -> Iterator[EagerPart]:
    if whole_model_refused:
        yield EagerPart("the model as a whole", whole_model_refused)
    modules = " ".join(module.name for module in stage.config.cuda_graph_modules or ())
    if modules:
        yield EagerPart("all else in layers", f"--cuda-graph-modules names {modules} only")
    for number, chunk in enumerate(stage.chunks):
        where, model = f" of chunk {number}" if len(stage.chunks) > 1 else "", chunk.model
        once = chunk.every_layer
        for layer in language_layers(model):
            if layer not in chunk.layers:
                place = getattr(layer, "layer_number", "?")
                why = why_not_graphable(layer, stage.config) or (
                    "_discover_layers leaves it out" if layer in once else "it runs several times for one micro-batch"
                )
                yield EagerPart(f"layer {place} ({type(layer).__name__}){where}", why)
        for name, module in () if model is None else _outside_layers(model):
            yield EagerPart(f"{name} ({type(module).__name__}){where}", "graphs hold layers only")


def _outside_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules with parameters that are outside of layers, largest parts first."""
    for name, module in model.named_children():
        if name == "decoder":
            for inner, part in module.named_children():
                if inner != "layers" and any(True for _ in part.parameters()):
                    yield f"decoder.{inner}", part
        elif name != "mtp" and any(True for _ in module.parameters()):
            yield name, module
