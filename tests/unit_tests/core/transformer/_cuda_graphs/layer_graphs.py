"""Create layer graphs without an engine."""

from typing import Any

import torch

from megatron.core.transformer._cuda_graphs.inputs import DefaultInputs
from megatron.core.transformer._cuda_graphs.layer_graph import LayerGraph
from megatron.core.transformer._cuda_graphs.snapshot import Snapshot


class Graphed:
    """Stand-in for a graphed callable of the engine; records its calls."""

    def __init__(self, output: Any = "output"):
        self.output = output
        self.calls: list[tuple[tuple, dict]] = []
        self.was_reset = False

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self.output

    def reset(self):
        self.was_reset = True


def layer_graph(graphed: Any = None, keywords: dict[str, torch.Tensor] | None = None, **changes: Any) -> LayerGraph:
    """Return a layer graph with the static keyword inputs ``keywords``, and with ``changes`` to its attributes."""
    graphed = graphed or Graphed()
    attributes: dict[str, Any] = {
        "name": "layer 3",
        "graphed": graphed,
        "run": graphed,
        "shape": None,
        "keywords": keywords or {},
        "defaults": DefaultInputs(),
        "ignored": frozenset(),
        "num_microbatches": None,
        "snapshot": Snapshot(""),
        "gathered": Snapshot(""),
        "may_run_eagerly": False,
        "logged": set(),
        "packed": None,
        "runner": None,
    }
    return LayerGraph(**attributes | changes)
