"""Clipping takes the same local tensors as megatron-core's own, and scales them alike."""

import gc
import weakref
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard


@pytest.fixture
def clip_grads(monkeypatch):
    from megatron.core.optimizer import clip_grads

    def zeros(*size, device, **options):  # megatron-core's flag is on the GPU
        return original(*size, **options)

    original = torch.zeros
    monkeypatch.setattr(torch, "zeros", zeros)
    return clip_grads


def test_the_local_tensor_of_a_dtensor(mesh, clip_grads):
    from megatron.core.utils import to_local_if_dtensor as megatron_cores

    tensor = DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
    assert clip_grads.to_local_if_dtensor(tensor) is megatron_cores(tensor)


def test_any_other_tensor_is_left_as_it_is(clip_grads):
    tensor = torch.ones(3)
    assert clip_grads.to_local_if_dtensor(tensor) is tensor


@pytest.fixture
def build(mesh):
    """Builds parameters with equal gradients each time, the second without; in ``decoupled_grad``, for any device."""

    def build(stay):
        generator = torch.Generator().manual_seed(1)
        params = [torch.nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Shard(0)])) for _ in range(3)]
        for param in params:
            param.decoupled_grad = None
        for param in params[::2]:
            give_gradient(param, torch.randn(4, generator=generator), stay=stay)
        return params

    return build


def give_gradient(param, tensor, stay):
    param.decoupled_grad = DTensor.from_local(tensor, param.device_mesh, param.placements)
    if stay:
        param.decoupled_grad.stays = True


def clipped(function, params, total_norm):
    function(params, 1.0, total_norm, use_decoupled_grad=True)
    return [param.decoupled_grad.to_local().tolist() for param in params if param.decoupled_grad is not None]


def other_gradient(params):
    give_gradient(params[0], torch.full((4,), 3.0), stay=True)


def other_memory(params):
    params[2].decoupled_grad._local_tensor = torch.full((4,), 3.0)


def other_storage(params):
    params[2].decoupled_grad._local_tensor.set_(torch.full((4,), 3.0))


def another_gradient(params):
    give_gradient(params[1], torch.full((4,), 3.0), stay=True)


def no_gradient(params):
    params[0].decoupled_grad = None


@pytest.mark.parametrize("stay", [True, False])
@pytest.mark.parametrize("change", [len, other_gradient, other_memory, other_storage, another_gradient, no_gradient])
def test_gradients_are_clipped_as_megatron_core_clips_them(build, clip_grads, stay, change):
    params, expected = build(stay), build(stay)
    for total_norm in (2.0, 0.5, 3.0):
        found = clipped(clip_grads.clip_grad_by_total_norm_fp32, params, total_norm)
        assert found == clipped(clip_grads._upstream.clip_grad_by_total_norm_fp32, expected, total_norm)
        change(params)
        change(expected)


def test_gradients_that_stay_are_asked_once(build, clip_grads, monkeypatch):
    params = build(stay=True)
    clipped(clip_grads.clip_grad_by_total_norm_fp32, params, 2.0)
    to_local = mock.Mock(side_effect=clip_grads.to_local_if_dtensor)
    monkeypatch.setattr(clip_grads, "to_local_if_dtensor", to_local)
    clipped(clip_grads.clip_grad_by_total_norm_fp32, params, 2.0)
    asked = [type(call.args[0]) for call in to_local.call_args_list]
    assert len(asked) == 2 and DTensor not in asked


@pytest.mark.parametrize("stay", [True, False])
def test_gradients_are_kept_no_longer_than_parameters_and_only_if_they_stay(build, clip_grads, stay):
    params = build(stay)
    clipped(clip_grads.clip_grad_by_total_norm_fp32, params, 2.0)
    grad = weakref.ref(params[0].decoupled_grad)
    params[0].decoupled_grad = None
    gc.collect()
    assert (grad() is not None) == stay
    del params
    gc.collect()
    assert grad() is None


def test_without_parameters_nothing_is_clipped(clip_grads):
    clip_grads.clip_grad_by_total_norm_fp32([], 1.0, 2.0)
