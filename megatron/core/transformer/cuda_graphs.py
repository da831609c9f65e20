"""The public module of Megatron-Core's CUDA graphs.

``docs/cuda_graphs_names.md`` says where each name is defined. What is not defined in this tree is megatron-core's own.
"""

from typing import TYPE_CHECKING, Any

from megatron_fsdp_cuda_graphs.overlay import extend

extend(__name__)

from .cuda_graph_order import (  # noqa: E402
    convert_schedule_table_to_order,
    get_overlap_moe_expert_parallel_comm_order,
)
from .current_microbatch import set_current_microbatch  # noqa: E402
from .graphable_layers import _layer_is_graphable  # noqa: E402
from .te_cuda_graph_helper import TECudaGraphHelper  # noqa: E402
from .vision_cuda_graphs import (  # noqa: E402
    VisionTECudaGraphHelper,
    _wrap_graph_for_vision,
    get_vision_cuda_graph_seq_length,
)

if TYPE_CHECKING:  # names that are megatron-core's own

    def __getattr__(name: str) -> Any: ...


__all__ = [
    "TECudaGraphHelper",
    "VisionTECudaGraphHelper",
    "_layer_is_graphable",
    "_wrap_graph_for_vision",
    "convert_schedule_table_to_order",
    "get_overlap_moe_expert_parallel_comm_order",
    "get_vision_cuda_graph_seq_length",
    "set_current_microbatch",
]
