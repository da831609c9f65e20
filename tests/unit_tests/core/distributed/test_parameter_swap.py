"""Test that swaps between raw and optimizer parameters match megatron-core, without lookups by name."""

from typing import Any
from unittest import mock

import pytest
import torch

from .fsdp_variants import SHARED, STRATEGIES, Variant, freeze_embedding, small, upstream_class

VARIANTS = {strategy: Variant(small(data_parallel_sharding_strategy=strategy)) for strategy in STRATEGIES}
VARIANTS |= {"tied": Variant(**SHARED), "frozen": Variant(change=freeze_embedding)}


def replace_norm(model):
    norm = torch.nn.LayerNorm(model.decoder.final_layernorm.weight.shape)
    norm.weight, norm.bias = model.decoder.final_layernorm.weight, model.decoder.final_layernorm.bias
    model.decoder.final_layernorm = norm


def remove_bias(model):
    model.decoder.layers[0].mlp.linear_fc1.bias = None


def exchange(fsdp, distributed):
    """Swap the modules' parameters; return whether megatron-core's lookup by name was used.

    ``distributed`` selects the optimizer's parameters instead of the raw ones.
    """
    name = f"_replace_param_with_{'distributed' if distributed else 'raw'}_if_needed"
    own = getattr(upstream_class(), name)
    with mock.patch.object(upstream_class(), name, autospec=True, side_effect=own) as by_name:
        getattr(fsdp, name)()
    return by_name.called


def held(fsdp):
    return [(name, id(param)) for name, param in fsdp.module.named_parameters(remove_duplicate=False)]


def by_megatron_core(fsdp):
    """Return the model's parameters before and after megatron-core's swap to raw parameters."""
    distributed = held(fsdp)
    assert exchange(fsdp, False)
    return distributed, held(fsdp)


@pytest.mark.parametrize("name", VARIANTS)
def test_later_swaps_match_the_first_of_megatron_core(ranks, name):
    fsdp = VARIANTS[name].build().module
    distributed, raw = by_megatron_core(fsdp)
    assert distributed != raw
    for _ in range(2):
        assert not exchange(fsdp, True)
        assert fsdp.is_param_fsdp_distributed
        assert held(fsdp) == distributed
        assert not exchange(fsdp, False)
        assert not fsdp.is_param_fsdp_distributed
        assert held(fsdp) == raw


@pytest.mark.parametrize("distributed", [True, False])
def test_unknown_parameters_are_refused_by_megatron_core(ranks, distributed):
    fsdp = VARIANTS["optim_grads_params"].build().module
    by_megatron_core(fsdp)
    exchange(fsdp, not distributed)
    fsdp.module.decoder.layers[0].register_parameter("new", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(AssertionError, match="new not found"):
        exchange(fsdp, distributed)


@pytest.mark.parametrize("change", [replace_norm, remove_bias])
def test_changed_models_get_their_raw_parameters(ranks, change):
    fsdp, other = (VARIANTS["optim_grads_params"].build().module for _ in range(2))
    for each in (fsdp, other):
        by_megatron_core(each)
        exchange(each, True)
        change(each.module)
    assert exchange(fsdp, False)
    upstream: Any = upstream_class()
    upstream._replace_param_with_raw_if_needed(other)
    names = {id(param): name for name, param in fsdp.raw_param.items()}
    others = {id(param): name for name, param in other.raw_param.items()}
    assert [(name, names[key]) for name, key in held(fsdp)] == [(name, others[key]) for name, key in held(other)]


@pytest.mark.parametrize("known", [True, False])
def test_zeroing_gradients_resets_the_fused_kernel_flag(ranks, known):
    fsdp = VARIANTS["frozen"].build().module
    if known:
        by_megatron_core(fsdp)
    for param in fsdp.module.parameters():
        param.grad_added_to_main_grad = True
    fsdp.zero_grad_buffer()
    assert all(param.grad_added_to_main_grad is not param.requires_grad for param in fsdp.module.parameters())
    assert any(param.grad_added_to_main_grad for param in fsdp.module.parameters())


@pytest.mark.parametrize("distributed", [True, False])
def test_unfrozen_parameter_is_an_error(ranks, distributed):
    fsdp = VARIANTS["frozen"].build().module
    exchange(fsdp, distributed)
    fsdp.module.embedding.requires_grad_(True)
    with pytest.raises(ValueError, match=r"requires_grad of \S*word_embeddings\.weight is on"):
        fsdp.zero_grad_buffer()
