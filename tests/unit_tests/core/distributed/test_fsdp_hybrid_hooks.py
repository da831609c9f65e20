"""Hybrid sharding, over groups inside groups, has the hooks of megatron-core too."""

import pytest

from .fsdp_variants import Variant, small
from .hook_listing import hooks_of, translated


@pytest.mark.parametrize(
    ("strategy", "outer"),
    [("optim_grads", "no_shard"), ("optim_grads_params", "no_shard"), ("optim_grads_params", "optim")],
)
def test_hooks_are_those_of_megatron_core_with_hybrid_sharding(hybrid_ranks, strategy, outer):
    sharding = {"num_distributed_optimizer_instances": hybrid_ranks, "outer_dp_sharding_strategy": outer}
    variant = Variant(small(data_parallel_sharding_strategy=strategy, fsdp_double_buffer=False), sharding=sharding)
    theirs, ours = (variant.build(upstream=upstream).module for upstream in (True, False))
    assert ours.dist_index.use_hybrid_fsdp
    assert hooks_of(ours) == translated(hooks_of(theirs))
