"""Transformer configurations that allow full recomputation with CUDA graphs."""

from copy import copy
from typing import Any

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)


class TransformerConfig(_upstream.TransformerConfig):
    """megatron-core's ``TransformerConfig``, which allows full recomputation of layers that share one graph."""

    def __post_init__(self) -> None:
        recomputes_layers = self.recompute_granularity == "full" and self.cuda_graph_impl == "transformer_engine"
        if recomputes_layers:  # megatron-core asserts against it: run all other checks without graphs
            eager = copy(self)
            eager.cuda_graph_impl = "none"
            eager.__post_init__()
            self.recompute_granularity: Any = None
        super().__post_init__()
        if recomputes_layers:
            self.recompute_granularity = "full"


class MLATransformerConfig(_upstream.MLATransformerConfig, TransformerConfig):
    """megatron-core's ``MLATransformerConfig``, which allows full recomputation with graphs."""
