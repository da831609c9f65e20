"""What can be read off graphs: how many there are, in which memory."""

from collections.abc import Sequence
from typing import Any

import torch

from ..engine.memory import PoolMemory
from ..report.record import KINDS, Pool


def graph_counts(graphed: Any) -> dict[str, int | None]:
    """Count the graphs of an engine's callable, or of whole passes, by kind; None where it does not show them."""
    if not hasattr(graphed, "forward_graph"):  # TransformerEngine's
        return dict.fromkeys(KINDS)
    return dict(zip(KINDS, [int(graph is not None) for graph in _graphs_of(graphed)], strict=True))


def _graphs_of(graphed: Any) -> list[torch.cuda.CUDAGraph | None]:
    names = ("forward_graph", "backward_graph", "weight_gradient_graph")
    return [getattr(graphed, name, None) for name in names]


def pools_of(graphs: Sequence[Any]) -> list[Pool]:
    """Return the memory pools of an engine's callables."""
    of_pool: dict[tuple, list[torch.cuda.CUDAGraph]] = {}
    for graphed in graphs:
        for graph in filter(None, _graphs_of(graphed)):
            of_pool.setdefault(tuple(graph.pool()), []).append(graph)
    return [Pool(len(own), PoolMemory.of(own[0]).size()) for own in of_pool.values()]
