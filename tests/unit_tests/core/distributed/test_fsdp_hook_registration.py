"""Test that Megatron-FSDP registers the same hooks as megatron-core, in the same order and with the same options."""

import copy
import weakref

import pytest
import torch

from .fsdp_variants import (
    FINE_BOTH,
    FINE_FORWARD,
    SHARED,
    STRATEGIES,
    Variant,
    delay_weight_gradients,
    freeze_embedding,
    hook_layers,
    small,
)
from .hook_listing import HOOK_DICTS, describe, hooks_of, translated

SENTINELS = {
    "_forward_pre_hooks": "_cuda_graph_backward_handler",
    "_forward_hooks": "_cuda_graph_backward_pre_handler",
}
VARIANTS = {
    **{strategy: Variant(small(data_parallel_sharding_strategy=strategy)) for strategy in STRATEGIES},
    "fine forward": Variant(fsdp=FINE_FORWARD),
    "fine forward and backward": Variant(fsdp=FINE_BOTH),
    "experts": Variant(small(experts=4, moe_shared_expert_intermediate_size=32)),
    "kept transposes": Variant(sharding={"keep_fp8_transpose_cache": True}),
    "frozen parameters": Variant(change=freeze_embedding),
    "shared parameters": Variant(**SHARED),
    "hooks of the user": Variant(change=hook_layers),
    "delayed weight gradients": Variant(change=delay_weight_gradients),
}


def build(name: str, **how):
    """Build the ``MegatronFSDP`` wrapper of the variant ``name``."""
    return VARIANTS[name].build(**how).module


@pytest.fixture(params=VARIANTS, scope="module")
def pair(request, ranks):
    """Return megatron-core's own wrapper and ours around identical models."""
    return build(request.param, upstream=True), build(request.param)


def test_hooks_match_megatron_core(pair):
    theirs, ours = (hooks_of(fsdp) for fsdp in pair)
    assert ours == translated(theirs)
    assert any(theirs.values())


def test_gradient_hooks_match_megatron_core(pair):
    counts = [
        {name: len(param._post_accumulate_grad_hooks or ()) for name, param in fsdp.raw_param.items()} for fsdp in pair
    ]
    assert counts[0] == counts[1]
    assert {*counts[0].values()} >= {1}


@pytest.fixture(scope="module")
def fsdp(ranks):
    return build("optim_grads_params")


def test_every_attaching_hook_names_its_handler(fsdp):
    for module in fsdp.modules():
        for kind, sentinel in SENTINELS.items():
            for hook in vars(module)[kind].values():
                _, _, handler = describe(hook).partition(" ")
                assert getattr(getattr(hook, sentinel, None), "__name__", "") == handler


@pytest.mark.parametrize("name", ["optim_grads_params", "fine forward and backward", "optim_grads"])
def test_every_hook_stays_out_of_graphs(ranks, name):
    from megatron.core.transformer._cuda_graphs.hooks import ModuleHooks

    for module in build(name).modules():
        withheld = ModuleHooks.extract(module, outside_only=True)
        left = [hook for kind in HOOK_DICTS for hook in vars(module)[kind].values()]
        withheld.restore()
        assert left == []


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
