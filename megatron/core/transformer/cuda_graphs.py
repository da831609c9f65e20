"""The public module of Megatron-Core's CUDA graphs.

``TECudaGraphHelper`` is defined in ``te_cuda_graph_helper``, the orders of passes in ``cuda_graph_order``. Every other
name is, so far, megatron-core's own.
"""

from typing import TYPE_CHECKING, Any

from megatron_fsdp_cuda_graphs.overlay import extend

extend(__name__)

from .cuda_graph_order import (  # noqa: E402
    convert_schedule_table_to_order,
    get_overlap_moe_expert_parallel_comm_order,
)
from .te_cuda_graph_helper import TECudaGraphHelper  # noqa: E402

if TYPE_CHECKING:  # names that are megatron-core's own

    def __getattr__(name: str) -> Any: ...


__all__ = ["TECudaGraphHelper", "convert_schedule_table_to_order", "get_overlap_moe_expert_parallel_comm_order"]
