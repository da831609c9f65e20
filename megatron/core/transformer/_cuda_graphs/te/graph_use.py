"""How the graphs of a helper are used: replays, steps that ran without them and why, captures, memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..eager_passes import EagerPasses
from .captured_parts import pools_of
from .decoder_graphs import DecoderGraphs
from .whole_model import ModelGraphs

# Why a step ran eagerly, as scalars are named.
BEFORE_CAPTURE, OTHER_INPUTS = "before-capture", "other-inputs"
NO_LAYERS, CAPTURE_FAILED, CAPTURES_USED_UP = "no-layers", "capture-failed", "captures-used-up"
INTERLEAVED_PASSES = "interleaved-passes"


@dataclass(frozen=True)
class GraphUse:
    """What became of graphs on this rank since the helper was made.

    Attributes:
        replays: How often forward graphs of training were replayed; None where the engine does not count.
        captures: How often training was captured.
        pool_bytes: The memory pools of the graphs that there are, those for evaluation included; None where the engine
            does not show them.
    """

    replays: int | None
    captures: int
    pool_bytes: int | None


class CountsUse:
    """The part of ``TECudaGraphHelper`` that says how its graphs are used. Counting costs replays nothing."""

    callables_per_chunk: Sequence[Sequence[Any]]
    model_graphs: ModelGraphs | None
    decoder_graphs: DecoderGraphs | None
    _capture_finished: bool
    _graphs_created: bool
    _logs_steps = True
    _step_log: Callable[[Any, bool], None] | None = None
    _captures = 0
    _stays_eager = NO_LAYERS  # why there are no graphs though capture has finished
    _eager_passes = EagerPasses()  # beside the graphs that there are
    _eager_passes_seen = 0
    _replays_before = 0  # of graphs that were deleted
    _measured: tuple[tuple[int, int], int | None] = (0, 0), 0

    def eager_reason(self) -> str:
        """Say why the step since the last call ran eagerly, in whole or in part; empty if it did not."""
        if not self._graphs_created:
            return self._stays_eager if self._capture_finished else BEFORE_CAPTURE
        seen, self._eager_passes_seen = self._eager_passes_seen, self._eager_passes.total
        return OTHER_INPUTS if seen != self._eager_passes_seen else ""

    def graph_use(self) -> GraphUse:
        """Return what became of the graphs on this rank so far."""
        training = self._graphs_of_training()
        graphs = training + [layer.evaluation_graph.graphed for layer in self._layers() if layer.evaluation_graph]
        state = self._captures, len(graphs)
        if state != self._measured[0]:  # a look at the allocator takes long, and pools do not grow after capture
            sizes = [pool.bytes for pool in pools_of(graphs)]
            self._measured = state, sum(sizes) if sizes or not graphs else None
        return GraphUse(self._replays(training), self._captures, self._measured[1])

    def _graphs_of_training(self) -> list[Any]:
        """The engine's callables that are replayed in training."""
        if self.model_graphs is not None:
            return [self.model_graphs.passes]
        recorded = [] if self.decoder_graphs is None else [self.decoder_graphs.passes]
        return recorded + [getattr(graph, "graphed", graph) for layer in self._layers() for graph in layer.cuda_graphs]

    def _layers(self) -> Iterator[Any]:
        return chain.from_iterable(self.callables_per_chunk)

    def _replays(self, graphs: Sequence[Any]) -> int | None:
        counts: list[Any] = [getattr(graphed, "replays", None) for graphed in graphs]
        return None if None in counts else self._replays_before + sum(counts)

    def _log_step(self, deleting: bool = False) -> None:
        if self._step_log is not None:
            self._step_log(self, deleting)

    def _count_before_deletion(self) -> None:
        """Log the last step, and keep the counts of graphs that are about to be deleted."""
        self._log_step(deleting=True)
        self._replays_before = self._replays(self._graphs_of_training()) or 0
        self._eager_passes, self._eager_passes_seen = EagerPasses(), 0
