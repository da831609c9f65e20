"""Which engine captures the graphs: this project's ``make_graphed_callables`` or TransformerEngine's."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..engine.make_graphed_callables import make_graphed_callables

ENGINE_VARIABLE = "MEGATRON_CUDA_GRAPH_ENGINE"
NATIVE, TRANSFORMER_ENGINE = "native", "transformer_engine"


@dataclass(frozen=True)
class Backend:
    """An engine and the parameters of its ``make_graphed_callables``.

    Attributes:
        name: ``native`` or ``transformer_engine``.
    """

    name: str
    capture: Callable[..., Any]
    parameters: frozenset[str]

    @property
    def takes_hooks(self) -> bool:
        """Whether it runs capture-time hooks."""
        return "capture_time_hooks" in self.parameters


def _engine(name: str, capture: Callable[..., Any]) -> Backend:
    return Backend(name, capture, frozenset(inspect.signature(capture).parameters))


def transformer_engine() -> Backend | None:
    """Return TransformerEngine's engine, or None if TransformerEngine cannot be imported."""
    try:
        from transformer_engine.pytorch.graph import make_graphed_callables as capture
    except Exception:  # a wheel without a CUDA driver fails in many ways
        return None
    return _engine(TRANSFORMER_ENGINE, capture)


def choose_backend(*, needs_hooks: bool = False) -> Backend:
    """Choose the engine by the environment variable ``MEGATRON_CUDA_GRAPH_ENGINE``.

    Its values are ``native`` (this project's engine, the default) and ``transformer_engine``. Both compute the same
    bits in all runs compared; ours needs less host time, less memory for each callable
    (``benchmarks/replay_overhead.py``), and no TransformerEngine.

    Args:
        needs_hooks: Whether the engine must run capture-time hooks; TransformerEngine's does from 2.19 on.

    Raises:
        ValueError: the variable has another value.
        RuntimeError: TransformerEngine's engine is selected and cannot be imported, or cannot run the hooks.
    """
    choice = os.environ.get(ENGINE_VARIABLE, NATIVE)
    if choice == NATIVE:
        return _engine(NATIVE, make_graphed_callables)
    if choice != TRANSFORMER_ENGINE:
        raise ValueError(f"{ENGINE_VARIABLE} must be {NATIVE} or {TRANSFORMER_ENGINE}, got {choice!r}")
    engine = transformer_engine()
    if engine is None:
        raise RuntimeError(f"{ENGINE_VARIABLE}={choice} needs TransformerEngine, which cannot be imported here")
    if needs_hooks and not engine.takes_hooks:
        raise RuntimeError(
            f"{ENGINE_VARIABLE}={choice} needs TransformerEngine 2.19 or newer: Megatron-FSDP's hooks must run at "
            "capture, and the installed make_graphed_callables takes no capture_time_hooks"
        )
    return engine
