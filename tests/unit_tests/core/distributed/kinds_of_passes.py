"""Define graph scopes, and steps with extra work between a forward and its backward pass."""

import torch

from .captured_training import graphed

MODEL, ALL, ONE = "model", "decoder", "layer"
SCOPES = {
    "model": graphed(MODEL, dropout=0.1),
    "all layers": graphed(ALL, dropout=0.1),
    "a layer": graphed(ONE, dropout=0.1),
    "parts": graphed(ONE, dropout=0.1, modules=("attn",)),
}


def of_another_length(training, step):
    """Return the loss of a batch with half the sequence length."""
    batch = next(training._batches(step))
    half = training.case.sequence // 2
    mask = batch.mask[..., :half, :half].contiguous()
    tokens, positions, labels = (each[:, :half].contiguous() for each in (batch.tokens, batch.positions, batch.labels))
    return training.chunks[0](tokens, positions, mask, labels=labels).float().mean()


def losses_of(training, step):
    return training._losses(training.chunks[0], next(training._batches(step))).float().mean()


def two_shapes(training):
    first, second = losses_of(training, 7), of_another_length(training, 8)
    second.backward()
    first.backward()


def evaluation_in_between(training):
    loss = losses_of(training, 7)
    training.chunks[0].eval()
    loss.backward()
    training.chunks[0].train()


def evaluation_pass_in_between(training):
    loss = losses_of(training, 7)
    training.chunks[0].eval()
    with torch.no_grad():
        losses_of(training, 8)
    training.chunks[0].train()
    loss.backward()


def eager_then_replay(training):
    first, second = of_another_length(training, 7), losses_of(training, 8)
    second.backward()
    first.backward()


PASSES = {
    passes.__name__: passes
    for passes in (two_shapes, eager_then_replay, evaluation_in_between, evaluation_pass_in_between)
}


def gradients_of(training, passes):
    """Run ``passes``, return the optimizer's gradients, and end ``training``."""
    try:
        training.step()
        with torch.cuda.stream(training.stream):
            training.fsdp.zero_grad_buffer()
            training.optimizer.zero_grad()
            passes(training)
            training.fsdp.finish_grad_sync()
        params = [param for group in training.optimizer.param_groups for param in group["params"]]
        grads = [param.grad for param in params if param.grad is not None]  # empty shards have no gradient
        return [getattr(grad, "_local_tensor", grad).clone() for grad in grads]
    finally:
        training.delete()
