"""Clean up a process between training runs.

Keeps torch.distributed and the model-parallel groups, because NCCL does not free the memory of destroyed communicators.
"""

import gc
import sys

import torch


def clean_up() -> float:
    """Free the memory of the finished run.

    Returns:
        MiB of tensors that remain allocated.
    """
    _forget_globals()
    _forget_graphs()
    _forget_fp8()
    _clear_caches_of_dtensor()
    torch._dynamo.reset()  # compiled functions reference traced objects
    torch.cuda.synchronize()
    gc.enable()
    for _ in range(2):
        gc.collect()
    _clear_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return round(torch.cuda.memory_allocated() / 2**20, 1)


def _forget_globals() -> None:
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_logging
    from megatron.training.global_vars import destroy_global_vars

    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        kind.forward.cache_clear()  # the cache references modules and, through hooks, the model
    destroy_global_vars()
    unset_num_microbatches_calculator()
    destroy_rerun_state_machine()
    parallel_state.get_global_memory_buffer().buffer.clear()
    # The next run may use a different tracker class.
    random._CUDA_RNG_STATE_TRACKER = None
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    moe_logging.set_moe_metrics_tracker(None)


def _forget_graphs() -> None:
    """Delete the graphs and static tensors held by megatron-core's global variables."""
    from megatron.core import full_cuda_graph
    from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

    delete_cuda_graphs()  # local graphs
    whole = full_cuda_graph.FullCudaGraphWrapper
    for stage in ("training", "validation"):
        whole.cuda_graph[stage] = whole.result[stage] = None
        whole.curr_iteration[stage] = 0
        full_cuda_graph.StaticBufferLoader.static_buffers[stage].clear()
    full_cuda_graph._shared_graph_pool = None
    override = getattr(torch.autograd.graph, "set_override_stale_capture_stream", None)
    if override is not None:
        override(False)


def _forget_fp8() -> None:
    """Delete TransformerEngine's global amax buffers."""
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization is not None:
        quantization.FP8GlobalStateManager.reset()


def _clear_caches_of_dtensor() -> None:
    """Clear the caches of sharding propagation and fake tensors.

    Cache keys include numbers, for example the step size of torch's Adam. A later run with the same learning rates
    would reuse the entries of the first run, and so be faster.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import debug

    FakeTensorMode.cache_clear()
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def _clear_workspaces() -> None:
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
