"""Graphs attached to layers, with what guards them, and taken away again."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ..eager_passes import EagerPasses
from ..engine.plan import Plan
from ..expected_inputs import DefaultInputs
from ..layer_graph import LayerGraph, LayerGraphs
from ..snapshot import Snapshot, memory_aspects, named
from .layers import layer_name
from .sample_inputs import SampleArguments, attention_mask_type, captures_attention, default_kwargs, packed_use
from .stage import Chunk, Layers, Stage

_ADVICE = (
    "call delete_cuda_graphs before parameters or main gradients are replaced, moved or offloaded, and "
    "create_cudagraphs afterwards"
)


def attach_graphs(
    stage: Stage,
    layers: Sequence[Layers],
    plan: Plan,
    graphs: Sequence[Any],
    samples: Sequence[SampleArguments],
    snapshots: Sequence[Snapshot],
    eager_passes: EagerPasses | None,
) -> None:
    """Give layers their graphs, with what guards them. Megatron-FSDP guards parameters itself.

    Where a schedule does not call layers, so that no hooks run, replays gather parameters under Megatron-FSDP.

    Args:
        layers: The captured layers of each chunk.
        graphs: The engine's callables, one for each slot of ``plan``.
        snapshots: For each layer what its graphs rely on.
        eager_passes: Counts passes of other shapes; None if these may not run eagerly.
    """
    wrappers = [chunk.fsdp for chunk, own in zip(stage.chunks, layers, strict=True) for _ in own]
    every = [layer for own in layers for layer in own]
    absent = default_kwargs(every, [kwargs for _, kwargs in samples])
    defaults: defaultdict[Any, DefaultInputs] = defaultdict(DefaultInputs)
    for index, (layer, fsdp, slots) in enumerate(zip(every, wrappers, plan.slots_of_callables, strict=True)):
        name = layer_name(layer, index)
        fused = stage.config.gradient_accumulation_fusion and fsdp is None
        aspects = memory_aspects(named(layer, name), buffers=False, parameters=fsdp is None, main_grads=fused)
        gathered = Snapshot(_ADVICE, *aspects)
        layer.cuda_graphs = LayerGraphs(
            LayerGraph(
                name,
                stage.role.wrap(graphs[slot]),
                *samples[slot],
                has_attention=captures_attention(layer),
                num_microbatches=None if stage.one_graph_serves_all else len(slots),
                absent=absent[slot],
                defaults=defaults[attention_mask_type(layer)],
                snapshot=snapshots[index],
                gathered=gathered,
                may_run_eagerly=stage.may_skip_replays,
                eager_passes=eager_passes,
                packed=packed_use(layer),
            )
            for slot in slots
        )
        if stage.config.overlap_moe_expert_parallel_comm and fsdp is not None:
            for graph in layer.cuda_graphs:
                graph.around = fsdp.fsdp_hooks.around_part(layer)


def detach_graphs(chunks: Sequence[Chunk]) -> None:
    """Free the graphs that layers have, and let Megatron-FSDP run its units eagerly."""
    for chunk in chunks:
        for layer in chunk.layers:
            if getattr(layer, "cuda_graphs", None):
                for graph in layer.cuda_graphs:
                    graph.reset()
                layer.cuda_graphs = []
                layer.cuda_graph_manual_hooks = []
        if chunk.fsdp is not None:
            chunk.fsdp.graphs.forget_graphs(chunk.layers)
