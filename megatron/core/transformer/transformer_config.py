"""A model's configuration, also of full recomputation beside graphs that hold more than a layer."""

from copy import copy
from typing import Any

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


class TransformerConfig(_upstream.TransformerConfig):
    """megatron-core's ``TransformerConfig``, with one difference.

    ``recompute_granularity="full"`` is taken with ``cuda_graph_impl="transformer_engine"`` too, whose graphs may hold
    all layers with their recomputation.
    """

    def __post_init__(self) -> None:
        recomputes_layers = self.recompute_granularity == "full" and self.cuda_graph_impl == "transformer_engine"
        if recomputes_layers:  # which an assertion forbids; all else that is checked of it holds without graphs too
            eager = copy(self)
            eager.cuda_graph_impl = "none"
            eager.__post_init__()
            self.recompute_granularity: Any = None
        super().__post_init__()
        if recomputes_layers:
            self.recompute_granularity = "full"


class MLATransformerConfig(_upstream.MLATransformerConfig, TransformerConfig):
    """megatron-core's ``MLATransformerConfig``, derived from the class above."""
