"""The public module of Megatron-Core's CUDA graphs, whole: nothing of it is megatron-core's own.

``docs/cuda_graphs_names.md`` says where each name is defined.
"""

from typing import Any

# What follows imports modules of megatron-core that ask this one whether graphs are being captured.
from . import capture_state
from .capture_state import (
    FREEZE_GC,
    _set_capture_end,
    _set_capture_start,
    _set_warmup_end,
    _set_warmup_start,
    is_graph_capturing,
    is_graph_warmup,
)

# isort: split
from . import local_graph_buffers
from .cuda_graph_order import convert_schedule_table_to_order, get_overlap_moe_expert_parallel_comm_order
from .current_microbatch import set_current_microbatch
from .first_last_layer import _determine_if_first_last_layer_of_this_vp_chunk, annotate_first_last_layer
from .generator_states import _clone_nested_tensors, _ensure_generator_state_is_cudagraph_safe
from .graph_arguments import ArgMetadata, CudagraphBufferMetadata, _check_supported_type, tree_map
from .graphable_layers import _layer_is_graphable
from .local_graph_manager import (
    CudaGraphManager,
    alloc_tensor_from_graph_mempool,
    delete_cuda_graphs,
    get_gtp_runner_streams,
)
from .local_graph_nodes import _CudagraphRecordNode, _CudagraphReplayNode, _GraphStatus
from .local_graph_record import _CudagraphGlobalRecord, create_cudagraphs, logger
from .local_graph_runner import _CudaGraphRunner
from .te_cuda_graph_helper import TECudaGraphHelper
from .tensor_reuse_pool import TensorReusePool
from .vision_cuda_graphs import (
    VisionTECudaGraphHelper,
    _wrap_graph_for_vision,
    get_vision_cuda_graph_seq_length,
)

# Variables of other files, whose value of the moment this module has too.
_LIVE = {
    "_IS_GRAPH_CAPTURING": capture_state,
    "_IS_GRAPH_WARMUP": capture_state,
    "fwd_buffer_reuse_ref_count": local_graph_buffers,
    "bwd_buffer_reuse_ref_count": local_graph_buffers,
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
