"""The public module of Megatron-Core's CUDA graphs: every name of it, over the files of ``_cuda_graphs``.

``docs/cuda_graphs_names.md`` says where each name is defined. Nothing here is megatron-core's own.

megatron-core has all of this in one file, where assigning to a name, or patching it, affects every function that uses
it. ``_Face`` makes the same true here.
"""

import sys
from types import FunctionType, ModuleType
from typing import Any

# First, because the imports below load modules of megatron-core that import these from this module.
from ._cuda_graphs import state as _state
from ._cuda_graphs.state import (
    FREEZE_GC,
    FREEZE_GC_MAX_TORCH_VERSION,
    _set_capture_end,
    _set_capture_start,
    _set_warmup_end,
    _set_warmup_start,
    is_graph_capturing,
    is_graph_warmup,
)

# isort: split
from ._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from ._cuda_graphs.engine.rng import _clone_nested_tensors, _ensure_generator_state_is_cudagraph_safe
from ._cuda_graphs.for_callers import (
    _backup_grads_before_capture,
    _determine_if_first_last_layer_of_this_vp_chunk,
    _restore_grads_after_capture,
    _set_skip_fp8_weight_update_tensor,
    annotate_first_last_layer,
    create_strong_ref,
    make_weakref,
)
from ._cuda_graphs.imported_names import *  # noqa: F403
from ._cuda_graphs.local import memory as _memory
from ._cuda_graphs.local.arguments import ArgMetadata, CudagraphBufferMetadata, _check_supported_type, tree_map
from ._cuda_graphs.local.manager import CudaGraphManager, alloc_tensor_from_graph_mempool, delete_cuda_graphs
from ._cuda_graphs.local.memory import TensorReusePool
from ._cuda_graphs.local.record import _CudagraphGlobalRecord, create_cudagraphs, logger
from ._cuda_graphs.local.runner import _CudagraphRecordNode, _CudagraphReplayNode, _CudaGraphRunner, _GraphStatus
from ._cuda_graphs.local.sharded_weights import _GTP_RUNNER_STREAMS, get_gtp_runner_streams
from ._cuda_graphs.te.helper import TECudaGraphHelper
from ._cuda_graphs.te.layers import _layer_is_graphable, set_current_microbatch
from ._cuda_graphs.te.order import convert_schedule_table_to_order, get_overlap_moe_expert_parallel_comm_order
from ._cuda_graphs.te.vision_helper import (
    VisionTECudaGraphHelper,
    _wrap_graph_for_vision,
    get_vision_cuda_graph_seq_length,
)

__all__ = [
    "FREEZE_GC",
    "FREEZE_GC_MAX_TORCH_VERSION",
    "_GTP_RUNNER_STREAMS",
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
    "_backup_grads_before_capture",
    "_check_supported_type",
    "_clone_nested_tensors",
    "_determine_if_first_last_layer_of_this_vp_chunk",
    "_ensure_generator_state_is_cudagraph_safe",
    "_layer_is_graphable",
    "_restore_grads_after_capture",
    "_set_capture_end",
    "_set_capture_start",
    "_set_skip_fp8_weight_update_tensor",
    "_set_warmup_end",
    "_set_warmup_start",
    "_wrap_graph_for_vision",
    "alloc_tensor_from_graph_mempool",
    "annotate_first_last_layer",
    "convert_schedule_table_to_order",
    "create_cudagraphs",
    "create_strong_ref",
    "delete_cuda_graphs",
    "get_gtp_runner_streams",
    "get_overlap_moe_expert_parallel_comm_order",
    "get_vision_cuda_graph_seq_length",
    "is_graph_capturing",
    "is_graph_warmup",
    "logger",
    "make_graphed_callables",
    "make_weakref",
    "set_current_microbatch",
    "tree_map",
]

# Variables that functions reassign: reading and writing them here goes through to their file.
_IS_GRAPH_CAPTURING: bool
_IS_GRAPH_WARMUP: bool
fwd_buffer_reuse_ref_count: int
bwd_buffer_reuse_ref_count: int
_VARIABLES = {
    "_IS_GRAPH_CAPTURING": _state,
    "_IS_GRAPH_WARMUP": _state,
    "fwd_buffer_reuse_ref_count": _memory,
    "bwd_buffer_reuse_ref_count": _memory,
}


class _Face(ModuleType):
    """Passes assignments to this module's names on to the files of ``_cuda_graphs``.

    Assigning to a name, or deleting it, does the same in the file that defines it and in all that imported it, so that
    ``mock.patch``, ``monkeypatch`` and plain assignment affect the functions there, and so does undoing them.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        for file in _FILES.get(name, ()):
            setattr(file, name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        for file in _FILES.get(name, ()):
            vars(file).pop(name, None)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_VARIABLES})


def _variable_of(file: ModuleType, name: str) -> property:
    return property(
        lambda face: getattr(file, name),
        lambda face, value: setattr(file, name, value),
        lambda face: delattr(file, name),
    )


def _files_by_name() -> dict[str, list[ModuleType]]:
    """For each of this module's names the files of the package that have it with the same value."""
    package = f"{__name__.rpartition('.')[0]}._cuda_graphs."
    files = [module for name, module in sorted(sys.modules.items()) if name.startswith(package)]
    shared = {name: value for name, value in globals().items() if not name.startswith("__")}
    return {
        name: [file for file in files if name in vars(file) and vars(file)[name] is value]
        for name, value in shared.items()
    }


_FILES = _files_by_name()
for _name, _file in _VARIABLES.items():
    setattr(_Face, _name, _variable_of(_file, _name))
# Pickles refer to classes and functions by module; without the patch only this one exists.
for _name in __all__:
    if isinstance(globals()[_name], type | FunctionType):
        globals()[_name].__module__ = __name__
del _name, _file
sys.modules[__name__].__class__ = _Face
