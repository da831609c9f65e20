"""The graphs of a pipeline stage, with all that there is only as long as there are graphs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.memory import PoolMemory
from ..engine.rng import GraphStates
from ..hooks import calls_weakly
from ..report import Pool
from .attached_graphs import detach_graphs
from .changed_shapes import ChangedShapes
from .decoder_graphs import DecoderGraphs
from .stage import Layers, Stage
from .torch_fsdp import KeptParameters
from .whole_model import ModelGraphs

# Why steps run eagerly, as scalars are named.
BEFORE_CAPTURE, OTHER_INPUTS = "before-capture", "other-inputs"
NO_LAYERS, CAPTURE_FAILED, CAPTURES_USED_UP = "no-layers", "capture-failed", "captures-used-up"
INTERLEAVED_PASSES, RECOMPUTED_LAYERS = "interleaved-passes", "recomputed-layers"


@dataclass(frozen=True)
class GraphUse:
    """Graph usage counters of this rank, since the helper was made.

    Attributes:
        replays: How often forward graphs of training were replayed; None where the engine does not count.
        captures: How often training was captured.
        pool_bytes: The memory pools of the graphs that there are, those for evaluation included; None where the engine
            does not show them.
    """

    replays: int | None
    captures: int
    pool_bytes: int | None


class StageGraphs:
    """What a capture of ``stage`` has made.

    Args:
        none_because: Why there are no graphs.

    Attributes:
        none_because: The argument; empty once there are graphs.
        microbatches: The micro-batches of the steps that the capture was for; None for any number.
        models: The graphs of the whole model, or of each chunk of it, in which case its layers have none.
        decoder: The graphs of all layers of the decoder, in which case these have none.
        kept: By chunk, the parameters that FSDP2 keeps for the graphs of its layers.
        shapes: The passes of other shapes; None where these may not run eagerly.
    """

    def __init__(self, stage: Stage, none_because: str = BEFORE_CAPTURE):
        self._stage = stage
        self.none_because = none_because
        self.microbatches: int | None = None
        self.models: Sequence[ModelGraphs] = ()
        self.decoder: DecoderGraphs | None = None
        self.kept: Mapping[torch.nn.Module, KeptParameters] = {}
        self.shapes: ChangedShapes | None = None
        self._rng_states: GraphStates | None = None
        self._rng_hooks: Sequence[Any] = ()
        self._eager_passes_seen = 0
        self._pools: tuple[int, int | None] = 0, 0  # the number of graphs and the bytes of their pools

    @property
    def layers_apart(self) -> list[Layers]:
        """The layers of each chunk that have graphs of their own, or are to have them."""
        together = {*(() if self.decoder is None else self.decoder.module.layers)}
        return [[layer for layer in chunk.layers if layer not in together] for chunk in self._stage.chunks]

    # ------------------------------------------------------------------------------------------------ random numbers

    def follow_rng_tracker(self) -> None:
        """Let graphs draw from what Megatron's RNG tracker has when a model is called: no fork is open then."""
        self._rng_states = GraphStates()
        adopt = calls_weakly(self._rng_states.adopt)
        models = [chunk.model for chunk in self._stage.chunks if chunk.layers and chunk.model is not None]
        self._rng_hooks = [model.register_forward_pre_hook(adopt) for model in models]

    def before_step(self) -> None:
        """Do the same before a step: some schedules call layers, not the model."""
        if self._rng_states is not None:
            self._rng_states.adopt()

    # ----------------------------------------------------------------------------------------------------------- use

    def eager_reason(self) -> str:
        """Say why the step since the last call ran eagerly, in whole or in part; empty if it did not."""
        if self.none_because or self.shapes is None:
            return self.none_because
        seen, self._eager_passes_seen = self._eager_passes_seen, self.shapes.passes.total
        return OTHER_INPUTS if seen != self._eager_passes_seen else ""

    def replays(self) -> int | None:
        """How often forward graphs of training were replayed; None where the engine does not count."""
        counts: list[Any] = [getattr(graphed, "replays", None) for graphed in self._of_training()]
        return None if None in counts else sum(counts)

    def pool_bytes(self) -> int | None:
        """The memory pools of all graphs; None where the engine does not show them."""
        graphs = [*self._of_training()]
        graphs += [each.evaluation.passes for each in self.models if each.evaluation is not None]
        if len(graphs) != self._pools[0]:  # a look at the allocator takes long, and pools do not grow after capture
            sizes = [pool.bytes for pool in pools_of(graphs)]
            self._pools = len(graphs), sum(sizes) if sizes else None
        return self._pools[1]

    def _of_training(self) -> Iterable[Any]:
        """The engine's callables that are replayed in training."""
        if self.models:
            return [passes for graphs in self.models for passes in graphs.slots]
        recorded = [] if self.decoder is None else [self.decoder.passes]
        return recorded + [
            getattr(graph, "graphed", graph) for each in self._stage.layers for graph in each.cuda_graphs
        ]

    # ------------------------------------------------------------------------------------------------------ deletion

    def delete(self) -> None:
        """Free all graphs, as far as there are any; nothing else may be called afterwards."""
        for hook in self._rng_hooks:
            hook.remove()
        for graphs in filter(None, (*self.models, self.decoder)):
            graphs.reset()
        for kept in self.kept.values():
            kept.release()
        detach_graphs(self._stage.chunks)


def pools_of(graphs: Sequence[Any]) -> list[Pool]:
    """Return the memory pools of an engine's callables."""
    of_pool: dict[tuple, list[torch.cuda.CUDAGraph]] = {}
    for graphed in graphs:
        for graph in filter(None, graphs_of(graphed)):
            of_pool.setdefault(tuple(graph.pool()), []).append(graph)
    return [Pool(len(own), PoolMemory.of(own[0]).size()) for own in of_pool.values()]


def graphs_of(graphed: Any) -> list[torch.cuda.CUDAGraph | None]:
    """The forward, backward and weight-gradient graph of an engine's callable, or of whole passes; None without one."""
    names = ("forward_graph", "backward_graph", "weight_gradient_graph")
    return [getattr(graphed, name, None) for name in names]
