"""Report of a capture: graphs, their memory, and eager parts of the model."""

import logging
import time
from collections.abc import Iterator

import torch

from ..engine.memory import PoolMemory
from .capture_state import CaptureScope, CaptureState, Holds, Status
from .layers import language_layers, layer_name, why_not_graphable
from .stage import Stage

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

_NOT_CAPTURED = "it runs several times per micro-batch, or _discover_layers omits it"


def report_capture(stage: Stage, graphs: CaptureState, started: float) -> None:
    """Log the graphs of ``stage`` and what runs eagerly, on rank 0.

    Args:
        graphs: The captured graphs; cached memory must have been released.
        started: ``time.time()`` at the start of the capture.
    """
    if graphs.status is not Status.CAPTURED or torch.distributed.get_rank() != 0:
        return
    slots = [slot for whole in graphs.models for slot in whole.slots]
    slots += [graph.graphed for layer in stage.layers for graph in layer.cuda_graphs]
    pools = {PoolMemory.of(slot.forward_graph) for slot in slots}
    lines = [
        f"Captured {'the whole model' if graphs.models else f'{len(stage.layers)} layers'} in "
        f"{time.time() - started:.2f} s (pairs of CUDA graphs: {len(slots)}, memory: "
        f"{sum(pool.size() for pool in pools) / 2**20:,.1f} MiB)"
    ]
    lines += [f"eager: {what}, because {why}" for what, why in eager_parts(stage, graphs.scope)]
    logger.info("\n  ".join(lines))


def eager_parts(stage: Stage, scope: CaptureScope) -> Iterator[tuple[str, str]]:
    """Yield ``(part, reason)`` for the model and for each layer without its own graph."""
    if scope.holds is Holds.MODEL:
        return
    if scope.not_model:
        yield "the model as a whole", scope.not_model
    for number, chunk in enumerate(stage.chunks):
        where = f" of chunk {number}" if len(stage.chunks) > 1 else ""
        for index, layer in enumerate(language_layers(chunk.model)):
            if layer not in chunk.layers:
                why = why_not_graphable(layer, stage.config) or _NOT_CAPTURED
                yield f"{layer_name(layer, index)}{where}", why
