"""Test that the gradient norm and the number of zeros count each element once."""

import pytest
import torch.distributed as dist

from tests.support.trainings import models

from .fsdp_variants import Variant, small


def built(variant):
    return models.optimizer(variant.case, [variant.build()], use_gloo_process_groups=False)


def ranks_of(group):
    return dist.get_process_group_ranks(group)


@pytest.mark.parametrize(("outer", "ranks"), [("no_shard", [0, 1]), ("optim", [0, 1, 2, 3])])
def test_replicas_sharding_gradients_count_together(four_ranks, outer, ranks):
    sharding = {"num_distributed_optimizer_instances": four_ranks(2), "outer_dp_sharding_strategy": outer}
    assert ranks_of(built(Variant(small(), sharding=sharding)).get_grad_stats_parallel_group()) == ranks


@pytest.mark.parametrize(("rank", "expert_groups"), [(0, 1), (1, 1), (1, 2), (2, 2)])
def test_first_replica_counts_an_unsharded_gradient(four_ranks, rank, expert_groups):
    four_ranks(1, rank=rank, expert_model_parallel_size=expert_groups)
    optimizer = built(Variant(small(data_parallel_sharding_strategy="no_shard", experts=4)))
    (chunk,) = optimizer.model_chunks
    chunk.zero_grad_buffer()
    chunk.finish_grad_sync()
    first = {False: rank == 0, True: rank < expert_groups}  # ranks with equal remainders share experts
    groups = [group for group in chunk.param_and_grad_buffer.parameter_groups if first[group.is_expert_param]]
    expected = sum(param.numel() for group in groups for param in group.params)
    assert ranks_of(optimizer.get_grad_stats_parallel_group()) == [0, 1, 2, 3]
    assert sum(grad.numel() for grad in optimizer.get_grads_for_grad_norm()) == expected
    assert optimizer.count_zeros() == expected
    assert (expected > 0) == any(first.values())
