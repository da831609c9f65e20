"""Test that Megatron-FSDP's hooks stay out of graphs, and release only units."""

import copy
import weakref

import pytest
import torch

from megatron.core.transformer._cuda_graphs.hooks import ModuleHooks

from .fsdp_variants import FINE_BOTH, Variant, small

HOOK_DICTS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@pytest.mark.parametrize(
    "variant",
    [Variant(), Variant(fsdp=FINE_BOTH), Variant(small(data_parallel_sharding_strategy="optim_grads"))],
    ids=["optim_grads_params", "fine forward and backward", "optim_grads"],
)
def test_every_hook_stays_out_of_graphs(ranks, variant):
    hooks = 0
    for module in variant.build().module.modules():
        hooks += sum(len(vars(module)[kind]) for kind in HOOK_DICTS)
        withheld = ModuleHooks.extract(module, outside_only=True)
        left = [hook for kind in HOOK_DICTS for hook in vars(module)[kind].values()]
        withheld.restore()
        assert left == []
    assert hooks


@pytest.fixture(scope="module")
def fsdp(ranks):
    return Variant().build().module


def test_only_units_are_released(fsdp):
    with pytest.raises(TypeError, match="cannot release GPTModel"):
        fsdp.fsdp_hooks.release_after_forward(fsdp.module)


def test_copies_of_hooked_modules_are_freed(fsdp):
    hooked = torch.nn.Identity()
    hooked._training_state = fsdp.module._training_state
    hooked.register_forward_pre_hook(fsdp.fsdp_hooks.unshard_for_forward, with_kwargs=True)
    copied = copy.deepcopy(hooked)
    copied(torch.ones(1))
    alive = weakref.ref(copied)
    del copied
    assert alive() is None
