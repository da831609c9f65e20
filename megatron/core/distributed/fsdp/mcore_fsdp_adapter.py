"""Extend Megatron-FSDP's adapter with device meshes for pipeline stages.

megatron-core creates the mesh over all ranks of the job, although a pipeline stage contains only some of them.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_fsdp_cuda_graphs.overlay import extend

_upstream: Any = extend(__name__)

if TYPE_CHECKING:  # megatron-core's names

    def __getattr__(name: str) -> Any: ...


class FullyShardedDataParallel(_upstream.FullyShardedDataParallel):
    """Extends megatron-core's ``FullyShardedDataParallel`` to wrap pipeline stages."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        # Freeing a stage's output early requires a tensor that is not a view, but Megatron-FSDP's hooks return views.
        config.deallocate_pipeline_outputs = False
        super().__init__(config, *args, **kwargs)


def _get_dp_tp_mesh(dp_cp_group, tp_group, ep_size: int = 1) -> torch.Tensor:
    """Return the mesh of ranks over which this rank's parameters are sharded.

    The mesh is int64 ``[data parallel, tensor parallel]``.

    Args:
        dp_cp_group: The group over which parameters are sharded; for experts, the expert-data-parallel group.
        ep_size: Ignored, because the groups already determine which ranks have the same experts.
    """
    return _mesh_of(dp_cp_group, tp_group)


def _get_hsdp_tp_mesh(outer_fsdp_dp_group, dp_cp_group, tp_group, ep_size: int = 1) -> torch.Tensor:
    """Return the meshes of all HSDP replicas as one: int64 ``[replicas, data parallel, tensor parallel]``."""
    return _mesh_of(outer_fsdp_dp_group, dp_cp_group, tp_group)


def _mesh_of(*groups: dist.ProcessGroup) -> torch.Tensor:
    """Return the mesh of ranks spanned by ``groups``, which all contain this rank: int64, one dimension per group.

    Each dimension has a constant stride, because Megatron numbers ranks in a grid of the parallel sizes.
    """
    rank = dist.get_rank()
    mesh = torch.tensor(rank)
    for group in groups:
        mesh = mesh.unsqueeze(-1) + (torch.tensor(dist.get_process_group_ranks(group)) - rank)
    return mesh
