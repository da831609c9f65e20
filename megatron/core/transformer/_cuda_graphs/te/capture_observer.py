"""Watches a capture on rank 0, shows how far it is, and reports on it afterwards."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from ..engine.plan import Pass, Plan
from ..report.page import write
from ..report.record import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENTS,
    BufferUse,
    CaptureReport,
    LayerRecord,
    StaticInput,
    total,
)
from ..report.table import table
from ..report.timeline import Planned, Timeline
from .captured_parts import graph_counts, hook_routes, pools_of, recorded_hooks, static_inputs_of
from .decoder_graphs import DecoderGraphs
from .layers import layer_name
from .sample_inputs import SampleArguments

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

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
    """Watches one capture, unless this is another rank than 0.

    Args:
        folder: Where the report is written to; None for nowhere.

    Attributes:
        timeline: What the capture is to be noted in; None for nothing.
    """

    def __init__(self, engine: str = "", folder: str | None = None, name: str = "", active: bool = False):
        self._engine, self._folder, self._name = engine, folder, name
        self.timeline = Timeline() if active else None
        self._plan = Plan((), ())
        self._report: CaptureReport | None = None

    @classmethod
    def on_rank_0(cls, engine: str, config: Any, name: str, number: int) -> "CaptureObserver":
        """Return one that watches on rank 0 only.

        Args:
            config: The ``TransformerConfig``; its attribute ``cuda_graph_report`` names the folder of the report.
            name: What the files of a first capture are called.
        """
        first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        folder = getattr(config, "cuda_graph_report", None)
        return cls(engine, folder, name if number == 1 else f"{name}_{number}", first)

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

    def _planned(self) -> list[Planned]:
        """The steps of the plan, each with its layer, micro-batch and kind."""
        places = enumerate(self._plan.slots_of_callables)
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
            self._record(layer_name(layer, index), 0, [], -1, recorded_with=0) for index, layer in enumerate(together)
        ]
        if decoder is not None:
            records[0] = self._record(records[0].name, 0, [decoder.passes], None, recorded_with=0)
        chunks = [chunk for chunk, own in enumerate(layers) for _ in own]
        for index, slots in enumerate(self._plan.slots_of_callables):
            records.append(self._record(names[index], chunks[index], [graphs[slot] for slot in slots], index))
        planned = [(first + (layer or 0), micro_batch, kind) for layer, micro_batch, kind in self._planned()]
        inputs = static_inputs_of(self._plan, graphs, samples, planned)
        for buffer in inputs:
            buffer.uses = [replace(use, first=use.first + first, last=use.last + first) for use in buffer.uses]
        order = [(index, 0, FORWARD) for index in range(first)]
        order += [*planned, *((index, 0, BACKWARD) for index in reversed(range(first)))]
        if decoder is not None:
            use = BufferUse(0, 0, 0, len(order) - 1)
            inputs += [StaticInput(name, each.nbytes, [use]) for name, each in decoder.passes.inputs.items()]
        passes = [replace(step, layer=0 if step.layer is None else first + step.layer) for step in timeline.passes]
        self._report = self._new_report(
            [*([] if decoder is None else [decoder.passes]), *graphs],
            layers=records,
            order=order,
            passes=passes,
            static_inputs=inputs,
            hooks=[*recorded_hooks(together), *hook_routes([layer for own in layers for layer in own], first)],
        )

    def _record(
        self, name: str, chunk: int, graphs: Sequence[Any], timed_as: int | None, recorded_with: int | None = None
    ) -> LayerRecord:
        """Return what is known of a layer, or of a chunk as a whole, whose passes have this number in the timeline."""
        assert self.timeline is not None
        return LayerRecord(
            name,
            chunk,
            len(graphs) or 1,
            total(list(map(graph_counts, graphs))),
            recorded_with,
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

    def _new_report(self, graphs: Sequence[Any], **fields: Any) -> CaptureReport:
        timeline = self.timeline
        assert timeline is not None
        known: dict[str, Any] = {
            "engine": self._engine,
            "whole_model": False,
            "seconds": {
                "warm_up": sum(timeline.warm_up_seconds.values()),
                "capture": sum(step.seconds for step in timeline.passes),
                "waiting": timeline.waited,
            },
            "passes": timeline.passes,
            "graphs": total(list(map(graph_counts, graphs))),
            "pools": pools_of(graphs),
        }
        return CaptureReport(**(known | fields))

    @_only_warns
    def finish(self, rest: Callable[[], dict[str, Any]]) -> None:
        """Log the report, and write it, if layers or a model were captured. Cached memory must have been released.

        Args:
            rest: Returns the fields ``collectives`` and ``eager`` of the report.
        """
        timeline, self.timeline = self.timeline, None
        if timeline is None or self._report is None:
            return
        timeline.sample("end")
        end = timeline.samples[-1].time - timeline.samples[0].time
        report = replace(
            self._report,
            memory=timeline.samples,
            seconds={"total": end, **self._report.seconds},
            **rest(),
        )
        logger.info(table(report))
        if self._folder is None:
            return
        try:
            pages = write(report, self._folder, self._name)
        except OSError as error:
            logger.warning(f"the report on CUDA graphs could not be written (--cuda-graph-report): {error}")
        else:
            logger.info(f"wrote the report on CUDA graphs to {' and '.join(map(str, pages))}")
