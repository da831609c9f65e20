"""The public module of Megatron-Core's CUDA graphs, whole: nothing of it is megatron-core's own.

``docs/cuda_graphs_names.md`` says where each name is defined.
"""

from typing import Any

# What follows imports modules of megatron-core that ask this one whether graphs are being captured.
from ._cuda_graphs import state
from ._cuda_graphs.state import (
    FREEZE_GC,
    _set_capture_end,
    _set_capture_start,
    _set_warmup_end,
    _set_warmup_start,
    is_graph_capturing,
    is_graph_warmup,
)

# isort: split
from ._cuda_graphs.engine.rng import _clone_nested_tensors, _ensure_generator_state_is_cudagraph_safe
from ._cuda_graphs.local import buffers
from ._cuda_graphs.local.arguments import ArgMetadata, CudagraphBufferMetadata, _check_supported_type, tree_map
from ._cuda_graphs.local.first_last_layer import (
    _determine_if_first_last_layer_of_this_vp_chunk,
    annotate_first_last_layer,
)
from ._cuda_graphs.local.manager import (
    CudaGraphManager,
    alloc_tensor_from_graph_mempool,
    delete_cuda_graphs,
    get_gtp_runner_streams,
)
from ._cuda_graphs.local.nodes import _CudagraphRecordNode, _CudagraphReplayNode, _GraphStatus
from ._cuda_graphs.local.record import _CudagraphGlobalRecord, create_cudagraphs, logger
from ._cuda_graphs.local.runner import _CudaGraphRunner
from ._cuda_graphs.local.tensor_reuse_pool import TensorReusePool
from ._cuda_graphs.te.current_microbatch import set_current_microbatch
from ._cuda_graphs.te.helper import TECudaGraphHelper
from ._cuda_graphs.te.layers import _layer_is_graphable
from ._cuda_graphs.te.order import convert_schedule_table_to_order, get_overlap_moe_expert_parallel_comm_order
from ._cuda_graphs.te.vision_helper import (
    VisionTECudaGraphHelper,
    _wrap_graph_for_vision,
    get_vision_cuda_graph_seq_length,
)

# Variables of other files, whose value of the moment this module has too.
_LIVE = {
    "_IS_GRAPH_CAPTURING": state,
    "_IS_GRAPH_WARMUP": state,
    "fwd_buffer_reuse_ref_count": buffers,
    "bwd_buffer_reuse_ref_count": buffers,
}


def __getattr__(name: str) -> Any:
    if name in _LIVE:
        return getattr(_LIVE[name], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FREEZE_GC",
    "ArgMetadata",
    "CudaGraphManager",
    "CudagraphBufferMetadata",
    "TECudaGraphHelper",
    "TensorReusePool",
    "VisionTECudaGraphHelper",
    "_CudaGraphRunner",
    "_CudagraphGlobalRecord",
    "_CudagraphRecordNode",
    "_CudagraphReplayNode",
    "_GraphStatus",
    "_check_supported_type",
    "_clone_nested_tensors",
    "_determine_if_first_last_layer_of_this_vp_chunk",
    "_ensure_generator_state_is_cudagraph_safe",
    "_layer_is_graphable",
    "_set_capture_end",
    "_set_capture_start",
    "_set_warmup_end",
    "_set_warmup_start",
    "_wrap_graph_for_vision",
    "alloc_tensor_from_graph_mempool",
    "annotate_first_last_layer",
    "convert_schedule_table_to_order",
    "create_cudagraphs",
    "delete_cuda_graphs",
    "get_gtp_runner_streams",
    "get_overlap_moe_expert_parallel_comm_order",
    "get_vision_cuda_graph_seq_length",
    "is_graph_capturing",
    "is_graph_warmup",
    "logger",
    "set_current_microbatch",
    "tree_map",
]
