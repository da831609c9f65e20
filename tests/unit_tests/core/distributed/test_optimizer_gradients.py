"""Test that the optimizer's gradients equal the main gradients, and use memory only during its step."""

from unittest import mock

import pytest
import torch

from .fsdp_variants import Variant, run_backward, small


@pytest.fixture(params=["bfloat16", "float32"])
def training(ranks, request):
    """Return a model whose main gradients have the parametrized dtype, and its case."""
    dtype = getattr(torch, request.param)
    variant = Variant(
        small(dtype="bf16"),
        sharding={"megatron_fsdp_cuda_graph_mode": True, "megatron_fsdp_main_grads_dtype": dtype},
    )
    return variant.build().module, variant.case


def attached(fsdp):
    """Return the local tensor of each optimizer gradient, or None if the gradient is missing."""
    grads = [param.grad for _, param in fsdp.param_and_grad_buffer.optimizer_named_parameters]
    return [None if grad is None else grad._local_tensor for grad in grads]


def main_gradients(fsdp):
    """Return the main gradient shard of each of the optimizer's parameters."""
    buffer = fsdp.param_and_grad_buffer
    shards = []
    for _, param in buffer.optimizer_named_parameters:
        grads = buffer.parameter_groups[buffer.param_to_param_group[param.orig_param]].main_grad_buffer
        shards.append(grads.get_item(grads.param_idx[param.orig_param], only_shard=True))
    return shards


def step(fsdp, case):
    """Run a forward and backward pass, and return the optimizer's gradients, which must equal the main gradients."""
    fsdp.zero_grad_buffer()
    run_backward(fsdp, case)
    fsdp.finish_grad_sync()
    fsdp.start_param_sync()
    grads = attached(fsdp)
    for grad, shard in zip(grads, main_gradients(fsdp), strict=True):
        assert (shard.numel() == 0) == (grad is None)
        if grad is not None:
            assert torch.equal(grad.view(-1), shard.float())
    assert any(grad is not None and grad.any() for grad in grads)
    return grads


def test_gradients_equal_main_gradients_and_keep_tensors(training):
    fsdp, case = training
    step(fsdp, case)  # attached by megatron-core
    second = step(fsdp, case)
    values = [None if grad is None else grad.clone() for grad in second]
    with torch.no_grad():
        for group in fsdp.param_and_grad_buffer.parameter_groups:
            group.model_weight_buffer.data.mul_(0.5)
    third = step(fsdp, case)
    assert all(one is other for one, other in zip(second, third, strict=True))
    changed = [not torch.equal(old, new) for old, new in zip(values, third, strict=True) if new is not None]
    assert any(changed)


def test_scaled_gradients_keep_sums_over_ranks(training):
    fsdp, case = training
    for _ in range(2):
        # megatron-core sums gradients in place.
        summed = [None if grad is None else grad.add_(1).clone() for grad in step(fsdp, case)]
        fsdp.scale_gradients(0.5)
        for grad, old in zip(attached(fsdp), summed, strict=True):
            assert old is None or torch.equal(grad, old * 0.5)


def test_gradients_take_no_memory_between_steps(training):
    fsdp, case = training
    for _ in range(3):
        grads = [grad for grad in step(fsdp, case) if grad is not None]
        dtype = main_gradients(fsdp)[0].dtype
        fsdp.zero_grad_buffer()
        assert attached(fsdp) == [None] * len(attached(fsdp))
        if dtype != torch.float32:
            assert {grad.untyped_storage().nbytes() for grad in grads} == {0}


@pytest.mark.parametrize("captured", [0, 1])
def test_gradients_stay_once_a_graph_has_written_them(training, captured):
    fsdp, case = training
    for number in range(2):
        fsdp.zero_grad_buffer()
        run_backward(fsdp, case)
        capturing = number == captured
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=capturing):
            fsdp.finish_grad_sync()
        fsdp.start_param_sync()
    before = attached(fsdp)
    fsdp.zero_grad_buffer()
    assert any(grad is not None for grad in before)
    assert all(one is other for one, other in zip(before, attached(fsdp), strict=True))


@pytest.mark.parametrize("capturing", [False, True])
def test_gradients_are_first_allocated_in_fresh_memory(training, capturing):
    fsdp, case = training
    fsdp.zero_grad_buffer()
    run_backward(fsdp, case)
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=capturing),
        mock.patch.object(torch.cuda, "empty_cache") as release,
    ):
        for _ in range(2):
            fsdp.param_and_grad_buffer.update_main_grads()
    assert release.call_count == (0 if capturing else 1)
