"""The gradients that a loss scale is divided out of."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def optimizer():
    """Makes an optimizer with parameters of these gradients."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def make(grads, name="grad", fsdp=True):
        made = DistributedOptimizer.__new__(DistributedOptimizer)
        params = [SimpleNamespace(**{name: grad}) for grad in grads]
        made.ddp_config = SimpleNamespace(use_megatron_fsdp=fsdp)
        made.config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=name == "decoupled_grad")
        made.is_stub_optimizer = False
        made.optimizer = SimpleNamespace(param_groups=[{"params": params[:1]}, {"params": params[1:]}])
        return made

    return make


def sharded(tensor):
    return SimpleNamespace(_local_tensor=tensor)


@pytest.mark.parametrize("name", ["grad", "decoupled_grad"])
def test_under_megatron_fsdp_they_are_the_shards_that_this_rank_has(optimizer, name):
    shards = [torch.ones(2), torch.ones(3)]
    made = optimizer([sharded(shards[0]), None, sharded(shards[1])], name)
    assert [id(grad) for grad in made._collect_main_grad_data_for_unscaling()] == [id(shard) for shard in shards]


def test_otherwise_they_are_megatron_cores(optimizer):
    tensors = [torch.ones(2), torch.ones(3)]
    found = optimizer(tensors, fsdp=False)._collect_main_grad_data_for_unscaling()
    assert [grad.data_ptr() for grad in found] == [tensor.data_ptr() for tensor in tensors]
