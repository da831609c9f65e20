"""Names of tensors that moved, where several layers are guarded together."""

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.addresses import MovedBufferError
from megatron.core.transformer._cuda_graphs.te.address_guard import GuardedLayer, guard_layers


def layers(*, main_grads):
    made = [torch.nn.Linear(2, 2) for _ in main_grads]
    for layer in made:
        for param in layer.parameters():
            param.main_grad = torch.zeros_like(param)
    guarded = [GuardedLayer(f"layer {i}", made[i], True, written) for i, written in enumerate(main_grads)]
    return made, guarded


@pytest.mark.parametrize("main_grads", [(True, True), (False, True), (True, False)])
def test_a_main_gradient_that_moved_is_named(main_grads):
    made, guarded = layers(main_grads=main_grads)
    guard = guard_layers(guarded, [])
    assert guard is not None
    guard.check()
    index = main_grads.index(True)
    made[index].bias.main_grad = torch.zeros(2)
    with pytest.raises(MovedBufferError, match=f"the main gradient of bias of layer {index}"):
        guard.check()


def test_nothing_needs_no_guard():
    assert guard_layers([GuardedLayer("layer", torch.nn.Identity(), True, True)], []) is None
