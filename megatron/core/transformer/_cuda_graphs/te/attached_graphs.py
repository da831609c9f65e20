"""Attach graphs and their snapshots to layers, and detach them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ..engine.plan import Plan
from ..inputs import DefaultInputs
from ..layer_graph import ATTENTION_INPUTS, LayerGraph, LayerGraphs
from ..snapshot import Snapshot, memory_aspects, named
from .layers import layer_name
from .sample_inputs import SampleArguments, attention_mask_type, captures_attention, default_kwargs, packed_use
from .stage import Chunk, Stage

_INPUTS = ". CUDA graphs need the same --seq-length, --micro-batch-size and precision in every step."
_MOVED = (
    "call delete_cuda_graphs before parameters or main gradients are replaced, moved or offloaded, and "
    "create_cudagraphs afterwards"
)


def attach_graphs(
    stage: Stage,
    plan: Plan,
    graphs: Sequence[Any],
    samples: Sequence[SampleArguments],
    snapshots: Sequence[Snapshot],
) -> None:
    """Attach graphs to the layers of ``stage``. Without Megatron-FSDP, replays also check the addresses of parameters.

    Args:
        graphs: The engine's callables, one per slot of ``plan``.
        samples: The static inputs of each slot.
        snapshots: One per layer.
    """
    wrappers = [chunk.fsdp for chunk in stage.chunks for _ in chunk.layers]
    absent = default_kwargs(stage.layers, [kwargs for _, kwargs in samples])
    logged: set[str] = set()
    defaults: defaultdict[Any, DefaultInputs] = defaultdict(DefaultInputs)
    for index, (layer, fsdp, slots) in enumerate(zip(stage.layers, wrappers, plan.slots_of_callables, strict=True)):
        name, apart = layer_name(layer, index), fsdp is None
        fused = stage.config.gradient_accumulation_fusion
        memory = memory_aspects(named(layer, name), main_grads=fused) if apart else ()
        gathered = Snapshot(_MOVED, *memory)
        layer.cuda_graphs = LayerGraphs()
        for slot in slots:
            (hidden_states,), kwargs = samples[slot]
            graphed = graphs[slot]
            graphed.name_inputs(name, ("hidden_states", *kwargs), _INPUTS)
            layer.cuda_graphs.append(
                LayerGraph(
                    name,
                    graphed,
                    run=stage.role.wrap(graphed),
                    shape=hidden_states.shape if stage.may_change_shape else None,
                    keywords={key: absent[slot][key] for key in kwargs},
                    defaults=defaults[attention_mask_type(layer)],
                    ignored=frozenset() if captures_attention(layer) else ATTENTION_INPUTS,
                    num_microbatches=None if stage.one_graph_serves_all else len(slots),
                    snapshot=snapshots[index],
                    gathered=gathered,
                    may_run_eagerly=stage.may_skip_replays,
                    logged=logged,
                    packed=packed_use(layer),
                    runner=None if apart else fsdp.graphs.layers[layer],
                )
            )


def detach_graphs(chunks: Sequence[Chunk]) -> None:
    """Free the graphs of all layers, and switch Megatron-FSDP's units back to eager mode."""
    for chunk in chunks:
        for layer in chunk.layers:
            for graph in getattr(layer, "cuda_graphs", ()):
                graph.reset()
            layer.cuda_graphs = []
            layer.cuda_graph_manual_hooks = []
        if chunk.fsdp is not None:
            chunk.fsdp.graphs.forget_graphs(chunk.layers)
