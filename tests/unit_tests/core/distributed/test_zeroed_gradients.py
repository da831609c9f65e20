"""A training step zeroes gradients twice, by the model and by the optimizer: the second time nothing is launched."""

from unittest import mock

import pytest
import torch

from .fsdp_variants import STRATEGIES, Variant, run_backward, small


@pytest.fixture(params=STRATEGIES)
def training(ranks, request):
    variant = Variant(small(strategy=request.param))
    return variant.build().module, variant.case


def zeroes(fsdp):
    """Zero the gradients; return whether that took a launch."""
    buffer = fsdp.param_and_grad_buffer
    with mock.patch.object(buffer, "zero_grad", wraps=buffer.zero_grad) as zero:
        fsdp.zero_grad_buffer()
    assert not any(grads.any() for grads in main_gradients(fsdp))
    return zero.called


def main_gradients(fsdp):
    buffers = (group.main_grad_buffer for group in fsdp.param_and_grad_buffer.parameter_groups)
    return [buffer.data for buffer in buffers if buffer is not None]


def step(fsdp, case):
    run_backward(fsdp, case)
    fsdp.finish_grad_sync()
    fsdp.start_param_sync()


def test_they_are_zeroed_once_in_each_step(training):
    fsdp, case = training
    for _ in range(3):
        assert zeroes(fsdp)
        assert not zeroes(fsdp)
        step(fsdp, case)
        assert any(grads.any() for grads in main_gradients(fsdp))


def test_a_backward_pass_that_no_reduction_follows_is_zeroed_away(training):
    fsdp, case = training
    assert zeroes(fsdp)
    run_backward(fsdp, case)
    assert zeroes(fsdp)


def test_gradients_of_a_backward_pass_that_is_forgotten_are_zeroed_away(training):
    fsdp, case = training
    assert zeroes(fsdp)
    with torch.autograd._unsafe_preserve_version_counter(tuple(main_gradients(fsdp))):  # as communication writes
        run_backward(fsdp, case)
    fsdp.microbatch_count = 0  # it did not come to its end
    fsdp.fsdp_hooks.forget_backward()
    assert zeroes(fsdp)


def test_a_graph_zeroes_them_whatever_was_before(training, monkeypatch):
    fsdp, _ = training
    assert zeroes(fsdp)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert zeroes(fsdp)
    monkeypatch.undo()
    assert zeroes(fsdp)  # recorded, but not yet run
    assert not zeroes(fsdp)


def test_what_a_user_writes_is_zeroed_away(training):
    fsdp, _ = training
    assert zeroes(fsdp)
    main_gradients(fsdp)[0][:1].fill_(1.0)
    assert zeroes(fsdp)
    assert not zeroes(fsdp)


def test_memory_that_was_replaced_is_zeroed(training):
    fsdp, _ = training
    assert zeroes(fsdp)
    buffer = next(group.main_grad_buffer for group in fsdp.param_and_grad_buffer.parameter_groups)
    buffer.data = torch.ones_like(buffer.data)
    assert zeroes(fsdp)


def test_capturing_layers_may_write_gradients(training):
    fsdp, _ = training
    assert zeroes(fsdp)
    with mock.patch.object(fsdp.fsdp_hooks.graphed, "capture", mock.MagicMock()), fsdp.capture_graphs([]):
        pass
    assert zeroes(fsdp)


def test_a_model_whose_reductions_are_in_a_graph_is_zeroed_each_time(training):
    fsdp, _ = training
    assert zeroes(fsdp)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        fsdp.finish_grad_sync()
    assert zeroes(fsdp)
    assert zeroes(fsdp)
