"""Test recorded all-gathers and reductions, and megatron-core's collectives as the fallback for moved buffers."""

from unittest import mock

import pytest
import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.pipelines import free_gradients, release_all
from megatron.core.transformer._cuda_graphs.errors import ChangedSinceCaptureError

from ..captured_training import FLAGS, occupied
from ..fsdp_variants import Variant, small

RANKS = 4  # each rank scales its gradients; collectives do nothing


@pytest.fixture
def fsdp(ranks):
    """Yield a model whose three layers replay recorded collectives."""
    fsdp = Variant(small(layers=3)).build(graphs=True).module
    layers = list(fsdp.module.decoder.layers)
    hooks = fsdp.fsdp_hooks
    with fsdp.graphs.layer_capture(layers) as owners:
        for layer in layers:
            hooks.unshard_for_forward(layer)
            hooks.release_after_forward(layer)
        for layer, owner in zip(reversed(layers), reversed(owners), strict=True):
            hooks.unshard_for_backward(layer)
            owner.consume_gradients(list(layer.parameters()), [torch.zeros_like(param) for param in layer.parameters()])
            hooks.release_after_backward(layer)
    for layer in layers:
        layer.replaying = fsdp.graphs.layers[layer]
    fsdp.start_param_sync()
    yield fsdp
    for layer in layers:
        del layer.replaying


@pytest.fixture
def layers(fsdp):
    return list(fsdp.module.decoder.layers)


def eager(owner, name):
    """Return a patch that counts calls of ``owner.name``, which only eager collectives call."""
    return mock.patch.object(owner, name, wraps=getattr(owner, name))


def unit_of(fsdp, layer):
    return fsdp.graphs.units[layer]


def group_of(fsdp, layer):
    return fsdp.param_and_grad_buffer.parameter_groups[unit_of(fsdp, layer).buckets[0]]


def gather(fsdp, layer):
    """Gather ``layer`` for a forward pass, and release it."""
    fsdp.fsdp_hooks.unshard_for_forward(layer)
    fsdp.fsdp_hooks.release_after_forward(layer)


def test_recorded_gathers_resume_after_an_eager_gather(fsdp, layers):
    with occupied(fsdp, "model_weight_buffer"):
        fsdp.all_gather_and_wait_parameters_ready(list(layers[2].parameters()), prefetch=False)
        release_all(fsdp)
    gathered_eagerly: list[list[int]] = [unit_of(fsdp, layers[2]).buckets, []]  # the second gather is a replay
    for expected in gathered_eagerly:
        with eager(fsdp.all_gather_pipeline, "async_bucket_gather") as gathered:
            gather(fsdp, layers[2])
        assert [call.args[0] for call in gathered.call_args_list] == expected


def main_gradients(fsdp, layer):
    return group_of(fsdp, layer).main_grad_buffer.data


def reduce(fsdp, layer, value):
    """Write ``value`` to all gradients of ``layer``, as its backward graph does, and reduce them."""
    runner = fsdp.graphs.layers[layer]
    runner.before_backward()
    for param in layer.parameters():
        param.get_main_grad().fill_(value)
    runner.after_backward()
    fsdp.grad_reduce_pipeline.wait_for_previous_grad_reduce(0)


def test_recorded_reduction_adds_to_the_shard(fsdp, layers):
    main_gradients(fsdp, layers[0]).zero_()
    with eager(torch.distributed, "reduce_scatter_tensor") as reduced:
        reduce(fsdp, layers[0], 3.0)
        reduce(fsdp, layers[0], 4.0)
    assert not reduced.called
    assert main_gradients(fsdp, layers[0]).unique().tolist() == [(3.0 + 4.0) / RANKS]


def test_moved_gradient_bucket_is_an_error(fsdp, layers):
    runner = fsdp.graphs.layers[layers[0]]
    (bucket,) = unit_of(fsdp, layers[0]).buckets
    with (
        occupied(fsdp, "main_grad_buffer"),
        pytest.raises(ChangedSinceCaptureError, match=f"the gradients of bucket {bucket} ") as error,
    ):
        runner.before_backward()
    assert all(flag in str(error.value) for flag in FLAGS)
    free_gradients(fsdp, unit_of(fsdp, layers[0]).buckets)


def test_megatron_core_reduces_a_moved_bucket(fsdp, layers):
    main_gradients(fsdp, layers[0]).zero_()
    params = list(layers[0].parameters())
    with occupied(fsdp, "main_grad_buffer"):
        for param in params:
            param.main_grad = param.get_main_grad()
            param.main_grad.fill_(2.0)
        with eager(torch.distributed, "reduce_scatter_tensor") as reduced:
            fsdp.grad_reduce_pipeline.reduce_gradients(params)
        fsdp.grad_reduce_pipeline.reset()
    assert reduced.call_count == 1
    assert main_gradients(fsdp, layers[0]).unique().tolist() == [2.0 / RANKS]
