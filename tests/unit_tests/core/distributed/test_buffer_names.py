"""Test that each model under Megatron-FSDP has its own fixed buffers, freed together with the model."""

import gc

import pytest

from .fsdp_variants import Variant, run_backward, small


def fixed_buffers():
    """Return the addresses of all fixed buffers in this process, by name and dtype."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_global_memory_buffer

    return {key: tensor.data_ptr() for key, tensor in get_global_memory_buffer().buffer.items()}


def free():
    """Free unused models."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    RotaryEmbedding.forward.cache_clear()  # caches the last 32 embeddings, which reference their models
    gc.collect()


@pytest.fixture
def before(ranks):
    """Return the fixed buffers of models of other tests."""
    free()
    return fixed_buffers()


def used(**sharding):
    """Return a small model that has run a forward and a backward pass."""
    case = small()
    model = Variant(case, sharding=sharding).build()
    run_backward(model.module, case)
    return model


@pytest.mark.parametrize("max_pool", [False, True])
def test_two_models_share_no_buffer(before, max_pool):
    first = used(megatron_fsdp_max_pool_double_buffer=max_pool)
    of_first = fixed_buffers().keys() - before.keys()
    second = used(megatron_fsdp_max_pool_double_buffer=max_pool)
    of_second = fixed_buffers().keys() - before.keys() - of_first
    assert len(of_first) == len(of_second) > 0
    assert not {fixed_buffers()[key] for key in of_first} & {fixed_buffers()[key] for key in of_second}
    del first, second


@pytest.mark.parametrize("max_pool", [False, True])
def test_buffers_are_freed_with_their_model(before, max_pool):
    model = used(megatron_fsdp_max_pool_double_buffer=max_pool)
    assert len(fixed_buffers()) > len(before)
    del model
    free()
    assert fixed_buffers() == before
