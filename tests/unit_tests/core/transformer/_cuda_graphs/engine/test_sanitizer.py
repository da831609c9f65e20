"""sanitizer: before a replay, what its graph uses and is not there any more is named."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.addresses import MovedBufferError
from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from megatron.core.transformer._cuda_graphs.engine.sanitizer import VARIABLE, CapturedTensor, Sanitizer, captured

pytestmark = pytest.mark.usefixtures("cpu_backend")
POOL = (0, 7)


class Layer(torch.nn.Module):
    """A module with a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, device="cuda"))
        self.register_buffer("scale", torch.full((4,), 2.0, device="cuda"))
        self.weight.main_grad = torch.zeros(4, device="cuda")

    def forward(self, x):
        return x * self.weight * self.scale


def new_input():
    return torch.ones(4, device="cuda", requires_grad=True)


def graphed():
    layer, static = Layer(), new_input()
    return make_graphed_callables(layer, (static,)), static


@pytest.fixture
def _on(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")


def free_weight(layer, static):
    layer.weight.data = torch.ones(4, device="cuda")


def free_buffer(layer, static):
    layer.scale = torch.ones(4, device="cuda")


def free_main_gradient(layer, static):
    layer.weight.main_grad = torch.ones(4, device="cuda")


def free_input(layer, static):
    static.data = torch.ones(4, device="cuda")


def resize_buffer(layer, static):
    layer.scale.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (free_weight, "weight .* was freed"),
        (free_buffer, "scale .* was freed"),
        (free_main_gradient, "the main gradient of weight .* was freed"),
        (free_input, "input 0 .* was freed"),
        (resize_buffer, "scale .* was resized from 16 to 0 bytes"),
    ],
)
@pytest.mark.usefixtures("_on")
def test_memory_that_went_is_named_before_the_replay(change, named):
    layer, static = graphed()
    layer(new_input())
    change(layer, static)
    with pytest.raises(MovedBufferError, match=f"{VARIABLE}: before the forward replay of .* of {named}"):
        layer(new_input())


@pytest.mark.usefixtures("_on")
def test_it_is_looked_for_before_the_backward_replay_too():
    layer, static = graphed()
    output = layer(new_input())
    free_buffer(layer, static)
    with pytest.raises(MovedBufferError, match=r"before the backward replay of .* of scale .* was freed"):
        output.sum().backward()


@pytest.mark.usefixtures("_on")
def test_replays_go_on_as_long_as_all_is_there():
    layer, _ = graphed()
    for _ in range(3):
        x = new_input()
        layer(x).sum().backward()
        assert x.grad.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("value", [None, "0"])
def test_nothing_is_looked_at_where_nobody_asked(monkeypatch, value):
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    layer, _ = graphed()
    assert layer.forward._replay.sanitizer is None


def check(tensors, segments):
    """Check ``tensors`` as if they were on a device whose allocator has these segments."""
    for tensor in tensors:
        tensor.is_on_device = True
    with mock.patch.object(torch.cuda, "memory_snapshot", return_value=segments):
        Sanitizer("layer", tensors, POOL).check("forward")


@pytest.mark.parametrize(
    ("pool", "state", "there"),
    [
        ((0, 0), "active_allocated", True),
        ((0, 0), "active_pending_free", True),
        ((0, 0), "inactive", False),
        (POOL, "inactive", True),
        ((0, 8), "inactive", False),
    ],
)
def test_the_allocator_must_have_it_in_use_or_the_pool_of_the_graphs_own_it(pool, state, there):
    tensor = torch.ones(4, device="cuda")
    block = {"address": tensor.data_ptr() - 64, "size": 128, "state": state}
    segment = {**block, "total_size": 128, "segment_pool_id": pool, "blocks": [block]}
    tensors = captured([("weight", tensor), ("none", None)])
    with nullcontext() if there else pytest.raises(MovedBufferError, match=r"of weight at 0x.* is not allocated any"):
        check(tensors, [segment])


def test_memory_outside_of_all_segments_is_not_allocated():
    tensor = torch.ones(4, device="cuda")
    with pytest.raises(MovedBufferError, match="is not allocated any more"):
        check([CapturedTensor("weight", tensor)], [])
