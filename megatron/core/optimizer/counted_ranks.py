"""The ranks over which statistics of Megatron-FSDP's gradients are reduced, so that each element counts once.

megatron-core has one group for all parameters: the ranks of an instance of hybrid sharding, which hold every shard
unless instances shard gradients among them; or, where gradients are not sharded, the model-parallel ranks of dense
layers, which are not those of experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state


class CountedRanks:
    """The ranks of a model, and which of its parameters' gradients count on this one.

    Attributes:
        replicated: Whether several of them hold the same gradients, of which only the first rank's count.
    """

    def __init__(self, chunks: Sequence[Any], group: dist.ProcessGroup):
        """Find the ranks. All of them must do so at the same time.

        Args:
            chunks: The model's chunks on this rank, under Megatron-FSDP.
            group: The ranks over which megatron-core reduces.
        """
        fsdp = chunks[0].module
        index, config = fsdp.dist_index, fsdp.ddp_config
        buffers = [chunk.module.param_and_grad_buffer for chunk in chunks]
        groups = [group for buffer in buffers for group in buffer.parameter_groups if group.is_expert_param]
        self._experts = {param for group in groups for param in group.params}
        self._index = index
        sharing = None
        if config.data_parallel_sharding_strategy == "no_shard":
            sharing = index.get_dp_group(is_expert_parallel=True)  # also in pipeline stages without experts
        self.replicated = sharing is not None and _ranks(sharing) != _ranks(index.get_dp_group())
        self.group = group
        if self.replicated:
            self.group = _spanned(group, index.get_dp_group())
        elif index.hsdp_outer_dp_shard:
            self.group = _spanned(group, index.get_outer_fsdp_group())

    def counted(self, params: Sequence[Any]) -> list[Any]:
        """Return those of ``params``, parameters of the optimizer, whose gradients count on this rank."""
        if not self.replicated:
            return list(params)
        first = {expert: self._index.get_dp_group(is_expert_parallel=expert).rank() == 0 for expert in (False, True)}
        return [param for param in params if first[param.orig_param in self._experts]]


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def _spanned(group: dist.ProcessGroup, other: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group of all ranks that two groups span. They wait as long for each other as those of ``group``.

    It is one of Megatron's groups: they get the timeouts that change after start-up.
    """
    # Ranks are numbered as places in a box, so a step along one side adds the same number wherever it is taken.
    own = dist.get_rank()
    ranks = sorted(rank + (further - own) for rank in _ranks(group) for further in _ranks(other))
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
    options: Any = group._get_backend(device).options  # None for backends that never wait
    timeout = None if options is None else options._timeout
    return parallel_state.create_group(ranks, timeout=timeout, use_local_synchronization=True)
