"""What can be read off the graphs of layers: how many, in which memory, with which static inputs and hooks."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ..engine.memory import PoolMemory
from ..engine.plan import Pass, Plan
from ..hooks import HOOK_KINDS, ModuleHooks, must_run_outside
from ..layer_graph import static_inputs
from ..report.record import KINDS, BufferUse, HookRoute, Pool, StaticInput
from ..report.timeline import Planned
from .sample_inputs import SampleArguments

WITHHELD, RECORDED = "withheld", "recorded"


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


def static_inputs_of(
    plan: Plan, graphs: Sequence[Any], samples: Sequence[SampleArguments], planned: Sequence[Planned], start: int = 0
) -> list[StaticInput]:
    """Return each static input with its uses.

    Args:
        plan: The order in which passes were captured, and are replayed.
        graphs: What the engine returned for each slot of ``plan``.
        samples: The static inputs that the engine was given.
        planned: The steps of ``plan`` with layer and micro-batch.
        start: How many other steps come before them.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, step in enumerate(plan.steps, start):
        if step.kind is Pass.FORWARD:
            first[step.slot] = place
        last[step.slot] = place
    found: dict[int, StaticInput] = {}
    for slot in sorted(first, key=first.__getitem__):
        layer, micro_batch, _ = planned[first[slot] - start]
        assert layer is not None
        for name, tensor in static_inputs(graphs[slot], *samples[slot]):
            buffer = found.setdefault(tensor.data_ptr(), StaticInput(name, tensor.nbytes))
            buffer.uses.append(BufferUse(layer, micro_batch, first[slot], last[slot]))
    return list(found.values())


def hook_routes(layers: Sequence[torch.nn.Module], first: int = 0, recorded: bool = False) -> list[HookRoute]:
    """Return where the hooks on and in ``layers``, counted from ``first``, go.

    Args:
        recorded: Whether all of them are recorded, with the layers in one graph, and not each layer by itself.
    """
    routes: list[HookRoute] = []
    for index, layer in enumerate(layers, first):
        for kind, hooks in ModuleHooks.of(layer).capture_time_hooks().items() if not recorded else ():
            routes += [
                HookRoute(index, "", _hook_name(getattr(hook, "__wrapped__", hook)), kind) for hook in hooks.values()
            ]
        for path, module in layer.named_modules():
            for hook in _hooks_on(module) if path or recorded else ():
                route = WITHHELD if must_run_outside(hook) and not recorded else RECORDED
                routes.append(HookRoute(index, path, _hook_name(hook), route))
    return routes


def _hooks_on(module: torch.nn.Module) -> Iterator[Any]:
    for kind in HOOK_KINDS:
        yield from getattr(module, f"_{kind}").values()


def _hook_name(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__qualname__", type(hook).__qualname__)
