"""Megatron-FSDP's adapter, whose meshes also fit pipeline stages, and which allows graphs of parts of MoE layers.

megatron-core lays the mesh over all ranks of the job; under pipeline parallelism a stage has only some of them. It
allows no graphs of layers beside ``--overlap-moe-expert-parallel-comm``.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


# From megatron-core 0.20 on FullyShardedDataParallel makes one of two versions; graphs are for the first.
_Base: Any = getattr(_upstream, "FullyShardedDataParallelV1", _upstream.FullyShardedDataParallel)


class FullyShardedDataParallel(_Base):
    """megatron-core's ``FullyShardedDataParallel``, which also wraps pipeline stages."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        # Freeing a stage's output early needs a tensor of its own, and Megatron-FSDP's hooks return views.
        config.deallocate_pipeline_outputs = False
        graphs = config.cuda_graph_impl
        if config.overlap_moe_expert_parallel_comm and graphs == "transformer_engine":
            config.cuda_graph_impl = "none"  # only asked to refuse others
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.cuda_graph_impl = graphs


if _Base is not _upstream.FullyShardedDataParallel:
    FullyShardedDataParallel.__name__ = FullyShardedDataParallel.__qualname__ = _Base.__name__
    globals()[_Base.__name__] = FullyShardedDataParallel
    globals()["FullyShardedDataParallel"] = _upstream.FullyShardedDataParallel


def _get_dp_tp_mesh(dp_cp_group, tp_group, ep_size: int = 1) -> torch.Tensor:
    """Return the ranks ``[data parallel, tensor parallel]`` that share parameters with this one, as int64.

    Args:
        dp_cp_group: The ranks over which parameters are sharded; of experts the expert-data-parallel ones.
        ep_size: Ignored: the groups say already which ranks have the same experts.
    """
    return _mesh_of(dp_cp_group, tp_group)


def _get_hsdp_tp_mesh(outer_fsdp_dp_group, dp_cp_group, tp_group, ep_size: int = 1) -> torch.Tensor:
    """Return the ranks ``[replicas, data parallel, tensor parallel]``, as int64; see ``_get_dp_tp_mesh``."""
    return _mesh_of(outer_fsdp_dp_group, dp_cp_group, tp_group)


def _mesh_of(*groups: dist.ProcessGroup) -> torch.Tensor:
    """Return the mesh of ranks that ``groups``, all of which have this rank, span, one dimension each, as int64.

    Megatron numbers ranks as places in a box whose sides are the parallel sizes, so a step along one side adds the same
    number wherever it is taken.
    """
    rank = dist.get_rank()
    mesh = torch.tensor(rank)
    for group in groups:
        mesh = mesh.unsqueeze(-1) + (torch.tensor(dist.get_process_group_ranks(group)) - rank)
    return mesh
