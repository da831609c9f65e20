"""Test that training continues unaffected after an exception in a backward pass."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tests.support.trainings import training as support

from .captured_training import in_use
from .fsdp_variants import STRATEGIES, Variant, run_backward, small


class Interruption(Exception):
    """Raised by a failing backward pass."""


def built(strategy):
    """Return a Megatron-FSDP model with deterministic parameters, and its case."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    case = small(data_parallel_sharding_strategy=strategy, layers=3)
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    model = Variant(case).build()
    return SimpleNamespace(model=model, case=case, fsdp=model.module)


def interrupted_backward(training):
    """Run a backward pass that fails once it reaches the second layer."""

    def interrupt(grad):
        raise Interruption

    handle = training.fsdp.module.decoder.layers[1].register_forward_hook(
        lambda module, args, output: output[0].register_hook(interrupt) and None
    )
    with pytest.raises(Interruption):
        run_backward(training.fsdp, training.case)
    handle.remove()


def step(training):
    """Run one step, and return the main gradients."""
    training.fsdp.zero_grad_buffer()
    run_backward(training.fsdp, training.case)
    training.fsdp.finish_grad_sync()
    buffers = (group.main_grad_buffer for group in training.fsdp.param_and_grad_buffer.parameter_groups)
    return [buffer.data.clone() for buffer in buffers if buffer is not None]


def same(these, those):
    return all(torch.equal(this, that) for this, that in zip(these, those, strict=True))


@contextmanager
def warns():
    with pytest.warns(UserWarning, match="an exception ended the last backward pass.* zero_grad_buffer"):
        yield


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_next_step_is_unaffected(one_rank, strategy):
    expected = step(built(strategy))
    assert any(grad.any() for grad in expected)
    training = built(strategy)
    interrupted_backward(training)
    assert training.fsdp.fsdp_hooks.backward.is_open
    with warns():
        gradients = step(training)
    assert same(gradients, expected)
    assert same(step(training), expected)


def test_forward_pass_drops_an_unfinished_backward(one_rank):
    expected = step(built("optim_grads_params"))
    training = built("optim_grads_params")
    interrupted_backward(training)
    with warns():
        training.fsdp(*forward_arguments(training))
    assert not training.fsdp.fsdp_hooks.backward.is_open
    assert same(step(training), expected)


def forward_arguments(model):
    batch = next(support._batches(model.case, 0))
    return batch.tokens, batch.positions, batch.mask


def test_zeroing_gradients_releases_everything(one_rank):
    training = built("optim_grads_params")
    interrupted_backward(training)
    with warns():
        training.fsdp.zero_grad_buffer()
    assert training.fsdp.graphs.gradients.awaited == set()
    assert all(param.grad is None for param in training.fsdp.raw_param.values())
    assert not any(training.fsdp.grad_reduce_pipeline.bucket_grad_ready_params)
    assert in_use(training.fsdp) == [{}, {}]
    assert {module._training_state.name for module in training.fsdp.module.modules()} == {"IDLE"}


def test_forward_pass_inside_backward_drops_nothing(one_rank):
    """Check that a forward pass within the backward pass, as in full recomputation, does not end the backward pass."""
    training = built("optim_grads_params")
    seen = []

    def forward_again(grad):
        training.fsdp.fsdp_hooks.before_forward((), {})
        seen.append(training.fsdp.fsdp_hooks.backward.is_open)

    layer = training.fsdp.module.decoder.layers[1]
    layer.register_forward_hook(lambda module, args, output: output[0].register_hook(forward_again) and None)
    step(training)
    assert seen == [True]
