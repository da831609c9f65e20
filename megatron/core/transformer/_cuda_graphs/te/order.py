"""Convert a pipeline schedule to the capture order of graphs.

In an order, as in the argument ``_order`` of ``make_graphed_callables``, ``c`` is the forward pass of model chunk ``c``
(1-based), ``-c`` is its backward pass and ``-c - 0.5`` is its delayed weight gradient computation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, zip_longest

from ..engine.plan import Pass, Plan, ordered_plan


@dataclass(frozen=True)
class PassOrder:
    """The passes of a pipeline stage in capture order.

    Attributes:
        order: The order of passes.
        num_layers_per_chunk: The number of captured layers in each chunk of ``order``.
        num_microbatches: The number of forward passes of each chunk.
        chunk_id_list: If each chunk of ``order`` is one layer, 0-based ``[model chunk, layer]`` for each forward pass
            and None for every other pass; otherwise None.
    """

    order: list[float]
    num_layers_per_chunk: list[int]
    num_microbatches: int
    chunk_id_list: list[list[int] | None] | None = None

    @cached_property
    def plan(self) -> Plan:
        """The engine's plan, with the captured layers as callables."""
        return ordered_plan(self.order, self.num_layers_per_chunk, sum(self.num_layers_per_chunk))


def convert_schedule_table_to_order(
    num_warmup_microbatches: int, num_model_chunks: int, schedule_table: Sequence[tuple[int, int]]
) -> list[int]:
    """Return the pass order of a pipeline stage: warm-up, 1F1B steady state, cool-down.

    Args:
        num_warmup_microbatches: The number of forward passes before the first backward pass.
        num_model_chunks: The number of model chunks of the stage.
        schedule_table: 0-based ``(micro-batch, model chunk)`` of each forward pass, as returned by
            ``megatron.core.pipeline_parallel.schedules.get_schedule_table``. Backward passes run through the chunks
            from last to first.

    Example with two chunks, five micro-batches in groups of three, and five warm-up passes:

    >>> microbatches, chunks = (0, 1, 2, 0, 1, 2, 3, 4, 3, 4), (0, 0, 0, 1, 1, 1, 0, 0, 1, 1)
    >>> convert_schedule_table_to_order(5, 2, list(zip(microbatches, chunks)))
    [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]
    """
    forwards = [chunk + 1 for _, chunk in schedule_table]
    backwards = [chunk - num_model_chunks for _, chunk in schedule_table]
    # The k-th backward pass follows the forward pass with index k + num_warmup_microbatches, if there is one.
    side_by_side = zip_longest(forwards, [0] * num_warmup_microbatches + backwards, fillvalue=0)
    return [step for pair in side_by_side for step in pair if step]


def get_overlap_moe_expert_parallel_comm_order(
    order: Sequence[int],
    num_layers_per_chunk: Sequence[int],
    capture_wgrad_graph: bool,
    captured: Sequence[Sequence[int | None]] | None = None,
) -> tuple[list[float], list[list[int] | None]]:
    """Return the order of layers under ``--overlap-moe-expert-parallel-comm``, with each layer as a separate chunk.

    A chunk's backward pass and the forward pass right after it alternate layer by layer, forward first.

    Args:
        order: The order of chunks.
        num_layers_per_chunk: The number of captured layers in each chunk.
        capture_wgrad_graph: Whether weight gradients have separate graphs. These follow the backward pass of their
            layer; for the first layer of a chunk, they follow the last pass of the forward chunk that runs alongside.
        captured: For each chunk, the index of each layer among the captured layers, or None for a layer that is
            scheduled but not captured. None if all layers are captured.

    Returns:
        The order of layers and, for each entry, 0-based ``[chunk, layer of the chunk]``, or None unless it is a
        forward pass.

    Example:

    >>> get_overlap_moe_expert_parallel_comm_order([1, 2, -2, 1, -1, -1], [1, 2], True)[0]
    [1, 2, 3, 1, -3, -3.5, -2, -2.5, -1, -1.5, -1, -1.5]
    """
    first_layer = [0, *accumulate(num_layers_per_chunk)]
    every = map(range, num_layers_per_chunk) if captured is None else captured
    places: list[Sequence[int | None]] = [(), *every]  # by chunk, where 0 means no pass
    steps: list[float] = []
    layers: list[list[int] | None] = []

    def add(chunk: int, layer: int, kind: Pass) -> None:
        place = places[chunk][layer] if 0 <= layer < len(places[chunk]) else None
        if place is None or (kind is Pass.WEIGHT_GRADIENTS and not capture_wgrad_graph):
            return
        number = first_layer[chunk - 1] + place + 1
        steps.append(number if kind is Pass.FORWARD else -number - (0.5 if kind is Pass.WEIGHT_GRADIENTS else 0))
        layers.append([chunk - 1, place] if kind is Pass.FORWARD else None)

    for back, fore in _side_by_side(order):
        layers_back = len(places[back])
        for turn in range(max(layers_back, len(places[fore]))):
            layer = layers_back - 1 - turn
            add(fore, turn, Pass.FORWARD)
            add(back, layer, Pass.BACKWARD)
            if layer > 0:
                add(back, layer, Pass.WEIGHT_GRADIENTS)
        add(back, 0, Pass.WEIGHT_GRADIENTS)
    return steps, layers


def _side_by_side(order: Sequence[int]) -> list[tuple[int, int]]:
    """Pair the chunk of each backward pass with the chunk of the forward pass right after it; 0 means no pass."""
    pairs: list[tuple[int, int]] = []
    for step in order:
        if step < 0:
            pairs.append((-step, 0))
        elif pairs and not pairs[-1][1]:
            pairs[-1] = pairs[-1][0], step
        else:
            pairs.append((0, step))
    return pairs
