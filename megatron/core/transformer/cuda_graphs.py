"""The public module of Megatron-Core's CUDA graphs.

``TECudaGraphHelper`` is defined in ``te_cuda_graph_helper``. Every other name is, so far, megatron-core's own.
"""

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream = extend(__name__)

from .te_cuda_graph_helper import TECudaGraphHelper  # noqa: E402

__all__ = ["TECudaGraphHelper"]
