"""With double buffers, a gradient bucket is written again only after the reduction that read it is over."""

import pytest
import torch

from .fsdp_variants import Variant, run_backward, small


class Reduction:
    """A reduction's event: notes which streams wait for its end."""

    def __init__(self):
        self.waiting: list[torch.cuda.Stream] = []

    def wait(self, stream=None):
        self.waiting.append(stream or torch.cuda.current_stream())


@pytest.fixture(scope="module")
def fsdp(ranks):
    return Variant(small(layers=3)).build().module


@pytest.fixture
def queued(fsdp):
    """Layers from the last to the first, with reductions of the first two of them queued and not over."""
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


def test_the_stream_that_writes_a_bucket_waits_for_its_last_reduction(queued):
    units, (first, second) = queued
    reused = units[0].mlp.linear_fc1.weight.main_grad.data_ptr()
    assert units[2].mlp.linear_fc1.weight.get_main_grad().data_ptr() == reused
    assert torch.cuda.current_stream() in first.waiting
    assert second.waiting == []


def test_a_bucket_in_the_free_buffer_waits_for_nothing(fsdp, queued):
    units, reductions = queued
    units[1].mlp.linear_fc1.weight.get_main_grad()
    assert all(reduction.waiting == [] for reduction in reductions)


def test_without_double_buffers_nothing_waits(ranks):
    variant = Variant(small(layers=3, fsdp_double_buffer=False))
    fsdp = variant.build().module
    run_backward(fsdp, variant.case)
    reduction = Reduction()
    fsdp.grad_reduce_pipeline.grad_reduce_queue.append((reduction, lambda: None, 0))
    fsdp.grad_reduce_pipeline._enforce_double_buffer_limit([0])
    fsdp.grad_reduce_pipeline.grad_reduce_queue.clear()
    assert reduction.waiting == []
