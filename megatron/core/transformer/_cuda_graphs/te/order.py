"""Convert a pipeline schedule to the capture order of graphs.

In an order, as in the argument ``_order`` of ``make_graphed_callables``, ``c`` is the forward pass of model chunk ``c``
(1-based), ``-c`` is its backward pass and ``-c - 0.5`` is its delayed weight gradient computation.
"""

from dataclasses import dataclass
from functools import cached_property

from ..engine.plan import Plan, ordered_plan


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
