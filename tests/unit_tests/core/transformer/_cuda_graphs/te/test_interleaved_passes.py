"""interleaved_passes: whether a backward pass comes after a further forward pass."""

import pytest
import torch

from megatron.core.transformer._cuda_graphs.te.interleaved_passes import InterleavedPasses


class Model(torch.nn.Module):
    """Returns what a key of ``kinds`` names: its output alone, or among others."""

    kinds = {"tensor": lambda out: out, "tuple": lambda out: (None, out), "dict": lambda out: {"losses": [out]}}

    def __init__(self, kind="tensor"):
        super().__init__()
        self.weight, self._wrap = torch.nn.Parameter(torch.ones(3)), self.kinds[kind]

    def forward(self, scale):
        return self._wrap(scale * self.weight)


def loss(output):
    (tensor,) = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if leaf is not None]
    return tensor.sum()


@pytest.fixture(params=Model.kinds)
def model(request):
    return Model(request.param)


def test_passes_in_turn(model):
    passes = InterleavedPasses(model)
    for _ in range(3):
        loss(model(2)).backward()
    assert not passes.found()


@pytest.mark.parametrize("together", [True, False])
def test_two_forward_passes_before_their_backward_passes(model, together):
    passes = InterleavedPasses(model)
    first, second = loss(model(2)), loss(model(3))
    if together:
        (first + second).backward()
    else:
        second.backward()
        first.backward()
    assert passes.found()


def test_a_pass_without_a_backward_pass_is_in_nobodys_way():
    model = Model()
    passes = InterleavedPasses(model)
    model(2)
    loss(model(3)).backward()
    assert not passes.found()


def test_evaluation_between_forward_and_backward_is_no_training():
    model = Model()
    passes = InterleavedPasses(model)
    first = loss(model(2))
    with torch.no_grad():
        model(3)
    model.eval()(3)
    first.backward()
    assert not passes.found()


def test_gradients_are_as_they_are_unwatched():
    model = Model()
    loss(model(2) + model(3)).backward()
    unwatched, model.weight.grad = model.weight.grad, None
    passes = InterleavedPasses(model)
    loss(model(2) + model(3)).backward()
    assert torch.equal(model.weight.grad, unwatched)
    assert passes.found()


def test_the_answer_ends_the_watch():
    model = Model()
    passes = InterleavedPasses(model)
    assert not passes.found()
    assert not model._forward_hooks
    loss(model(2) + model(3)).backward()
    assert not passes.found()


def test_who_is_forgotten_watches_no_longer():
    model = Model()
    passes = InterleavedPasses(model)
    del passes
    output = model(2)
    assert output._backward_hooks is None
