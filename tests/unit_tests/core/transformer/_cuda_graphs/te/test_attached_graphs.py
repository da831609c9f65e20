"""Names of tensors that moved."""

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.addresses import MovedBufferError
from megatron.core.transformer._cuda_graphs.te.attached_graphs import guard_layer


def test_a_main_gradient_that_moved_is_named():
    layer = torch.nn.Linear(2, 2)
    for param in layer.parameters():
        param.main_grad = torch.zeros_like(param)
    guard = guard_layer("layer 1", layer, [], main_grads=True)
    assert guard is not None
    guard.check()
    layer.bias.main_grad = torch.zeros(2)
    with pytest.raises(MovedBufferError, match="the main gradient of bias of layer 1"):
        guard.check()


def test_nothing_needs_no_guard():
    assert guard_layer("layer", torch.nn.Identity(), [], main_grads=True) is None
