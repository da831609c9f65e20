"""Graphs attached to layers, with what guards them, and taken away again."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..attribute_reads import AttributeReads
from ..eager_passes import EagerPasses
from ..engine.addresses import AddressGuard
from ..layer_graph import LayerGraph, LayerGraphs, static_inputs
from ..replay_conditions import ReplayConditions
from .address_guard import GuardedLayer, guard_layer
from .layers import layer_name
from .sample_inputs import SampleArguments, captures_attention, default_kwargs, packed_use
from .stage import Chunk, Layers, Stage


@dataclass(frozen=True)
class CapturedLayers:
    """Layers whose passes an engine has captured.

    Attributes:
        stage: The stage that they are of.
        layers: The captured layers of each chunk.
        slots: For each layer the indices of its micro-batches in ``graphs`` and ``samples``, as of ``slots_of_layers``.
        graphs: The engine's callables.
        samples: Their static positional and keyword inputs.
    """

    stage: Stage
    layers: Sequence[Layers]
    slots: Sequence[Sequence[int]]
    graphs: Sequence[Any]
    samples: Sequence[SampleArguments]

    def attach(self, conditions: Sequence[ReplayConditions], eager_passes: EagerPasses | None) -> None:
        """Give layers their graphs.

        Args:
            conditions: For each layer what its passes read.
            eager_passes: Counts passes of other shapes; None if these may not run eagerly.
        """
        stage = self.stage
        layers = [layer for own in self.layers for layer in own]
        guards = self.guards()
        absent = default_kwargs(layers, [kwargs for _, kwargs in self.samples])
        given: dict[int, torch.Tensor | None] = {}
        for index, (layer, slots) in enumerate(zip(layers, self.slots, strict=True)):
            graphs = (
                LayerGraph(
                    layer_name(layer, index),
                    self.graphs[slot],
                    *self.samples[slot],
                    has_attention=captures_attention(layer),
                    num_microbatches=None if stage.one_graph_serves_all else len(slots),
                    absent=absent[slot],
                    given=given,
                    keeps_values=len(stage.chunks) > 1,  # only the first and the last chunk of a model read batches
                    guard=guards[index],
                    conditions=conditions[index],
                    may_run_eagerly=stage.may_skip_replays,
                    eager_passes=eager_passes,
                    packed=packed_use(layer),
                )
                for slot in slots
            )
            layer.cuda_graphs = LayerGraphs(map(stage.role.wrap, graphs))

    def guards(self) -> list[AddressGuard | None]:
        """Return a guard for each layer, None for layers with nothing to guard.

        Megatron-FSDP guards parameters itself.
        """
        layers: list[GuardedLayer] = []
        fused = self.stage.config.gradient_accumulation_fusion  # backward graphs add to ``param.main_grad``
        for chunk, own in zip(self.stage.chunks, self.layers, strict=True):
            alone = chunk.fsdp is None
            for layer in own:
                layers.append(GuardedLayer(layer_name(layer, len(layers)), layer, alone, alone and fused))
        guards: list[AddressGuard | None] = []
        guarded: set[int] = set()  # layers share static inputs
        for index, slots in enumerate(self.slots):
            inputs = []
            for slot in slots:
                for name, tensor in static_inputs(self.graphs[slot], *self.samples[slot]):
                    if id(tensor) not in guarded:
                        guarded.add(id(tensor))
                        inputs.append((f"{name} of {layers[index].name}", tensor))
            guards.append(guard_layer(layers[index], inputs))
        return guards


@contextmanager
def noted_conditions(
    layers: Sequence[torch.nn.Module], elsewhere: Collection[torch.nn.Module]
) -> Iterator[list[ReplayConditions]]:
    """Note what the passes of ``layers`` read that are captured in this context.

    Args:
        layers: The layers, which have their hooks again at the end of the context.
        elsewhere: Layers that have other parameters when they are called than at capture.

    Yields:
        What is empty until the end of the context: the conditions of each layer.
    """
    conditions: list[ReplayConditions] = []
    reads = AttributeReads()
    with reads.noted(layers):
        yield conditions
    conditions += [
        ReplayConditions([layer], reads, [layer], layer_name(layer, index), parameters=layer not in elsewhere)
        for index, layer in enumerate(layers)
    ]


def slots_of_layers(num_layers_per_chunk: Sequence[int], num_microbatches: int) -> list[range]:
    """Return for each layer the indices of its micro-batches among the captured callables.

    These come by chunk, then micro-batch, then layer.
    """
    slots: list[range] = []
    for layers in num_layers_per_chunk:
        first = len(slots) * num_microbatches
        slots += [range(first + layer, first + layers * num_microbatches, layers) for layer in range(layers)]
    return slots


def gather_in_replays(chunks: Sequence[Chunk]) -> None:
    """Let replays gather parameters under Megatron-FSDP: the schedule does not call layers, and no hooks run."""
    for chunk in chunks:
        if chunk.fsdp is not None:
            for layer in chunk.layers:
                for graph in layer.cuda_graphs:
                    graph.around = chunk.fsdp.around_part(layer)


def detach_graphs(chunks: Sequence[Chunk]) -> None:
    """Free the graphs that layers have, and let Megatron-FSDP run its units eagerly."""
    for chunk in chunks:
        for layer in chunk.layers:
            if getattr(layer, "cuda_graphs", None):
                for graph in layer.cuda_graphs:
                    graph.reset()
                layer.cuda_graphs = []
                layer.cuda_graph_manual_hooks = []
        if chunk.fsdp is not None:
            chunk.fsdp.forget_graphs(chunk.layers)
