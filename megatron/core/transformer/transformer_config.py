"""Allow full recomputation with CUDA graphs in transformer configurations."""

from copy import copy
from typing import TYPE_CHECKING, Any

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


_check = _upstream.TransformerConfig.__post_init__


def _post_init(self: Any) -> None:
    """Run megatron-core's checks, and allow full recomputation of layers that share one graph."""
    recomputes_layers = self.recompute_granularity == "full" and self.cuda_graph_impl == "transformer_engine"
    if recomputes_layers:  # megatron-core rejects this; run its other checks without graphs
        eager = copy(self)
        eager.cuda_graph_impl = "none"
        eager.__post_init__()
        self.recompute_granularity = None
    _check(self)
    if recomputes_layers:
        self.recompute_granularity = "full"


_upstream.TransformerConfig.__post_init__ = _post_init  # in place, so that all subclasses inherit it
