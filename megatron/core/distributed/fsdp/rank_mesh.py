"""The ranks that several process groups span together."""

import torch
import torch.distributed as dist


def mesh_of(*groups: dist.ProcessGroup) -> torch.Tensor:
    """Return the mesh of ranks that ``groups``, all of which have this rank, span, one dimension each, as int64.

    Megatron numbers ranks as places in a box whose sides are the parallel sizes, so a step along one side adds the same
    number wherever it is taken.
    """
    rank = dist.get_rank()
    mesh = torch.tensor(rank)
    for group in groups:
        mesh = mesh.unsqueeze(-1) + (torch.tensor(dist.get_process_group_ranks(group)) - rank)
    return mesh
