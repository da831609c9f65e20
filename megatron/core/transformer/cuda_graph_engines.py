"""Which engine captures the graphs: this project's ``make_graphed_callables`` or TransformerEngine's."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .graphed_callables import make_graphed_callables

ENGINE_VARIABLE = "MEGATRON_CUDA_GRAPH_ENGINE"
NATIVE, TRANSFORMER_ENGINE, AUTO = "native", "transformer_engine", "auto"


@dataclass(frozen=True)
class Engine:
    """An engine and what its ``make_graphed_callables`` can be given.

    Attributes:
        name: ``native`` or ``transformer_engine``.
        capture: The function.
        parameters: The names of its parameters.
    """

    name: str
    capture: Callable[..., Any]
    parameters: frozenset[str]

    @property
    def takes_hooks(self) -> bool:
        """Whether it runs capture-time hooks."""
        return "capture_time_hooks" in self.parameters


def _engine(name: str, capture: Callable[..., Any]) -> Engine:
    return Engine(name, capture, frozenset(inspect.signature(capture).parameters))


def transformer_engine() -> Engine | None:
    """Return TransformerEngine's engine, or None where TransformerEngine is not there."""
    try:
        from transformer_engine.pytorch.graph import make_graphed_callables as capture
    except Exception:  # a wheel without a CUDA driver fails in many ways
        return None
    return _engine(TRANSFORMER_ENGINE, capture)


def choose_engine(
    *, needs_transformer_engine: str = "", needs_hooks: bool = False, needs_megatron_rng: bool = False
) -> Engine:
    """Choose the engine, as the environment variable ``MEGATRON_CUDA_GRAPH_ENGINE`` says.

    Its values are ``native``, ``transformer_engine`` and ``auto``, the default: TransformerEngine's engine where it is
    there and can do the job, because both are about equally fast and it shares memory between graphs; else this
    project's.

    Args:
        needs_transformer_engine: Why only TransformerEngine's engine will do (a flag, say); empty if either does.
        needs_hooks: Whether the engine must run capture-time hooks, which TransformerEngine's does from 2.19 on.
        needs_megatron_rng: Whether layers draw from generators of Megatron's own RNG tracker, which TransformerEngine's
            engine does not know.

    Raises:
        ValueError: the variable has another value.
        RuntimeError: the engine that is asked for or needed is not there, or cannot do the job.
    """
    choice = os.environ.get(ENGINE_VARIABLE, AUTO)
    if choice not in (NATIVE, TRANSFORMER_ENGINE, AUTO):
        raise ValueError(f"{ENGINE_VARIABLE} must be {NATIVE}, {TRANSFORMER_ENGINE} or {AUTO}, got {choice!r}")
    if choice == NATIVE and needs_transformer_engine:
        raise RuntimeError(f"{needs_transformer_engine} needs TransformerEngine's engine: unset {ENGINE_VARIABLE}")
    engine = None if choice == NATIVE else transformer_engine()
    fits = engine is not None and not needs_megatron_rng and (engine.takes_hooks or not needs_hooks)
    if choice == NATIVE or (choice == AUTO and not fits and not needs_transformer_engine):
        return _engine(NATIVE, make_graphed_callables)
    why = needs_transformer_engine or f"{ENGINE_VARIABLE}={choice}"
    if engine is None:
        raise RuntimeError(f"{why} needs TransformerEngine, which cannot be imported here")
    if needs_hooks and not engine.takes_hooks:
        raise RuntimeError(
            f"{why} needs TransformerEngine 2.19 or newer: Megatron-FSDP's hooks must run at capture, and the "
            "installed make_graphed_callables takes no capture_time_hooks"
        )
    return engine
