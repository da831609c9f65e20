"""TransformerEngine's capture flag."""

import sys
from contextlib import AbstractContextManager, nullcontext

from ..replacements import between


def transformer_engine_flag() -> AbstractContextManager[None]:
    """Return a context in which TransformerEngine's capture flag, which its modules read, is set, if it is loaded."""
    graph = sys.modules.get("transformer_engine.pytorch.graph")
    if graph is None or graph.is_graph_capturing():
        return nullcontext()
    return between(graph.set_capture_start, graph.set_capture_end)
