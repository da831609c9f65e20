"""Transformer configurations that allow full recomputation with CUDA graphs."""

from copy import copy
from typing import Any

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


class TransformerConfig(_upstream.TransformerConfig):
    """Extends megatron-core's ``TransformerConfig`` to allow full recomputation of layers that share one graph."""

    def __post_init__(self) -> None:
        recomputes_layers = self.recompute_granularity == "full" and self.cuda_graph_impl == "transformer_engine"
        if recomputes_layers:  # megatron-core rejects this; run its other checks without graphs
            eager = copy(self)
            eager.cuda_graph_impl = "none"
            eager.__post_init__()
            self.recompute_granularity: Any = None
        super().__post_init__()
        if recomputes_layers:
            self.recompute_granularity = "full"


class MLATransformerConfig(_upstream.MLATransformerConfig, TransformerConfig):
    """Extends megatron-core's ``MLATransformerConfig`` to allow full recomputation with graphs."""
