"""The norm of gradients, and how many of them are zero, count each element once."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron.core import parallel_state
from tests.support.trainings import models

from .fsdp_variants import Variant, small

pytestmark = pytest.mark.sampled


@pytest.fixture
def counted_ranks():
    from megatron.core.optimizer.counted_ranks import CountedRanks

    return CountedRanks


def built(variant):
    """The optimizer of a model."""
    return models.optimizer(variant.case, [variant.build()], use_gloo_process_groups=False)


def ranks_of(group):
    return dist.get_process_group_ranks(group)


@pytest.mark.parametrize(("outer", "counted"), [("no_shard", [0, 1]), ("optim", [0, 1, 2, 3])])
def test_instances_that_shard_gradients_among_them_count_together(four_ranks, outer, counted):
    sharding = {"num_distributed_optimizer_instances": four_ranks(2), "outer_dp_sharding_strategy": outer}
    assert ranks_of(built(Variant(small(), sharding=sharding)).get_grad_stats_parallel_group()) == counted


def test_ranks_without_the_model_do_not_count(four_ranks, counted_ranks, monkeypatch):
    four_ranks(1)
    timeouts = []
    create = parallel_state.create_group

    def create_group(ranks, timeout, **kwargs):
        timeouts.append(timeout)
        return create(ranks, **kwargs)

    monkeypatch.setattr(parallel_state, "create_group", create_group)
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=77)))
    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda group, device: backend)
    outer = dist.new_group([0, 2])
    index = SimpleNamespace(hsdp_outer_dp_shard=True, get_outer_fsdp_group=lambda: outer)
    fsdp = SimpleNamespace(
        dist_index=index,
        ddp_config=SimpleNamespace(data_parallel_sharding_strategy="optim_grads_params"),
        param_and_grad_buffer=SimpleNamespace(parameter_groups=[]),
    )
    found = counted_ranks([SimpleNamespace(module=fsdp)], dist.new_group([0]))
    assert ranks_of(found.group) == [0, 2]
    assert timeouts == [timedelta(seconds=77)]
    assert found.group in parallel_state._global_process_group_list


# With one group of experts every rank has all gradients; with two the second rank has the experts of the last.
@pytest.mark.parametrize(("expert_groups", "counts_dense", "ranks"), [(1, True, [1]), (2, False, [0, 1, 2, 3])])
def test_where_nothing_is_sharded_the_first_of_the_ranks_with_a_gradient_counts_it(
    four_ranks, expert_groups, counts_dense, ranks
):
    four_ranks(1, rank=1, expert_model_parallel_size=expert_groups)
    optimizer = built(Variant(small(data_parallel_sharding_strategy="no_shard", experts=4)))
    (chunk,) = optimizer.model_chunks
    chunk.zero_grad_buffer()
    chunk.finish_grad_sync()
    groups = [group for group in chunk.param_and_grad_buffer.parameter_groups if counts_dense or group.is_expert_param]
    expected = sum(param.numel() for group in groups for param in group.params)
    assert ranks_of(optimizer.get_grad_stats_parallel_group()) == ranks
    assert sum(grad.numel() for grad in optimizer.get_grads_for_grad_norm()) == expected > 0
    assert optimizer.count_zeros() == expected


def test_a_pipeline_stage_without_experts_counts_with_the_others(four_ranks):
    four_ranks(1, rank=1, expert_model_parallel_size=2)
    optimizer = built(
        Variant(small(data_parallel_sharding_strategy="no_shard", experts=4, layers=2, moe_layer_freq=(0, 0)))
    )
    assert ranks_of(optimizer.get_grad_stats_parallel_group()) == [0, 1, 2, 3]
