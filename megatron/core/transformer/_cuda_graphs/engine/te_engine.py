"""TransformerEngine's state around a capture: its capture flag, and cleanup after a failure of its own engine."""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ..replacements import between
from .capture import Capture


def transformer_engine_flag() -> AbstractContextManager[None]:
    """Return a context in which TransformerEngine's capture flag, which its modules read, is set, if it is loaded."""
    graph = sys.modules.get("transformer_engine.pytorch.graph")
    if graph is None or graph.is_graph_capturing():
        return nullcontext()
    return between(graph.set_capture_start, graph.set_capture_end)


@contextmanager
def recover_te_engine(pool: tuple, modules: Sequence[torch.nn.Module], recipe: Any = None) -> Iterator[None]:
    """Clean up after a failed capture of TransformerEngine's engine, which does not do so itself.

    It leaves its stream current, garbage collection off, torch in capture mode, its own capture flag set, another
    ``__call__`` on the classes of the modules, its forward hooks on all that they consist of, and the FP8 statistics of
    warm-up.

    Args:
        pool: The memory pool that the engine captures into.
    """
    stream, gc_enabled = torch.cuda.current_stream(), gc.isenabled()
    calls = {kind: vars(kind).get("__call__") for kind in map(type, modules)}
    parts = [part for module in modules for part in module.modules()]
    hooks = [list(part._forward_hooks) for part in parts]
    graph = sys.modules.get("transformer_engine.pytorch.graph")
    statistics = graph.save_fp8_tensors(modules, recipe) if graph is not None and recipe is not None else None
    try:
        yield
    except BaseException:
        for kind, call in calls.items():
            if call is not None:
                setattr(kind, "__call__", call)  # noqa: B010
            elif "__call__" in vars(kind):
                del kind.__call__
        for part, before in zip(parts, hooks, strict=True):
            for added in part._forward_hooks.keys() - set(before):
                del part._forward_hooks[added]
        if graph is not None:
            graph.set_capture_end()
            graph.restore_fp8_tensors(modules, statistics)
        torch.cuda.set_stream(stream)
        if gc_enabled:
            gc.enable()
        Capture(pool).recover()
        raise
