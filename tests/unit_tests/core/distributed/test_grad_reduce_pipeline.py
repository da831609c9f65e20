"""Test that a gradient bucket is overwritten only after the reduction that reads it."""

import pytest
import torch

from .fsdp_variants import Variant, small


class Reduction:
    """A stand-in for a reduction's event that records the streams waiting for it."""

    def __init__(self):
        self.waiting: list[torch.cuda.Stream] = []

    def wait(self, stream=None):
        self.waiting.append(stream or torch.cuda.current_stream())


@pytest.fixture(scope="module")
def fsdp(ranks):
    return Variant(small(layers=3)).build().module


@pytest.fixture
def queued(fsdp):
    """Yield the layers in backward order, the first two with unfinished reductions in the queue."""
    fsdp.start_param_sync()
    pipeline, units = fsdp.grad_reduce_pipeline, list(reversed(fsdp.module.decoder.layers))
    reductions = []
    for unit in units[:2]:
        param = unit.mlp.linear_fc1.weight
        param.main_grad = param.get_main_grad()
        bucket = fsdp.param_and_grad_buffer.param_to_param_group[param]
        free = pipeline.get_fsdp_buffer(bucket).free_bucket_storage
        reductions.append(Reduction())
        pipeline.grad_reduce_queue.append((reductions[-1], free, bucket))
    yield units, reductions
    pipeline.wait_for_previous_grad_reduce(0)
    fsdp.finish_grad_sync()


def test_writers_of_a_bucket_wait_for_its_last_reduction(queued):
    units, (first, second) = queued
    reused = units[0].mlp.linear_fc1.weight.main_grad.data_ptr()
    assert units[2].mlp.linear_fc1.weight.get_main_grad().data_ptr() == reused
    assert torch.cuda.current_stream() in first.waiting
    assert second.waiting == []


def test_free_buffer_is_claimed_without_waiting(fsdp, queued):
    units, reductions = queued
    units[1].mlp.linear_fc1.weight.get_main_grad()
    assert all(reduction.waiting == [] for reduction in reductions)
