"""Test sharing and lifetimes of graph memory."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables

from .captured_cases import Forward, assert_same_bits, device_tensor, mlp

pytestmark = pytest.mark.usefixtures("cpu_backend")


def captured_for_sharing(order, shares=True, layers=2):
    """Capture layers in the pipeline order ``order``, and return the graphs of all slots.

    If ``shares``, slots may share the memory of inputs and outputs.
    """
    count = layers * max(order.count(1), 1)
    samples = [(device_tensor(4, 6, seed=slot),) for slot in range(count)]
    modules = tuple(mlp() for _ in range(layers))
    return make_graphed_callables(
        modules, samples, _order=order, _num_layers_per_chunk=[layers], _reuse_graph_input_output_buffers=shares
    )


@pytest.mark.parametrize(("order", "shares"), [([1, -1, 1, -1], True), ([1, 1, -1, -1], False)])
def test_static_inputs_are_shared_after_their_last_reader(order, shares):
    slots = captured_for_sharing(order, layers=1)
    assert (slots[0].inputs[0] is slots[1].inputs[0]) is shares


@pytest.mark.parametrize("shares", [True, False])
def test_shared_outputs_do_not_hold_memory(shares):
    (slot,) = captured_for_sharing([1, -1], shares, layers=1)
    address = slot.outputs[0].data_ptr()
    uses = torch._C._storage_Use_Count(slot.outputs[0].untyped_storage()._cdata)
    assert slot(device_tensor(4, 6)).data_ptr() == address
    # The CPU backend's pool owns all memory, so an output that owns its memory shares the pool's storage.
    assert (uses <= 2) is shares


def test_backward_overwrites_gradients_of_previous_backward():
    slots = captured_for_sharing([1, -1], layers=3)
    inputs = [device_tensor(4, 6, seed=slot) * 1 for slot in range(3)]  # non-leaf: gradients of leaves are copied
    outputs = [slot(x) for slot, x in zip(slots, inputs, strict=True)]
    grads = []
    for x, output in zip(reversed(inputs), reversed(outputs), strict=True):
        grads += torch.autograd.grad(output.sum(), x)
    assert [bool(grad.isnan().any()) for grad in grads] == [True, False, False]


def shifted(linear, x):
    """Add the bias, so that the input gradient is the output gradient itself."""
    return x + linear.bias


def captured_shifts(order, count, **options):
    layers = tuple(Forward(shifted) for _ in range(count))
    samples = [(device_tensor(4, 6, seed=slot),) for slot in range(count * order.count(1))]
    return layers, make_graphed_callables(
        layers, samples, _order=order, _reuse_graph_input_output_buffers=True, **options
    )


def test_unchanged_gradient_outlives_the_next_backward(monkeypatch):
    _, slots = captured_shifts([1, 1, -1, -1], 1)
    inputs = [device_tensor(4, 6, seed=slot) for slot in range(2)]
    first, second = (slot(x) for slot, x in zip(slots, inputs, strict=True))
    (grad,) = torch.autograd.grad(first, inputs[0], torch.full_like(first, 3))
    torch.autograd.grad(second, inputs[1], torch.full_like(second, 7))
    assert_same_bits([grad], [torch.full_like(grad, 3)])


def test_unchanged_gradients_of_parallel_layers_are_added():
    layers, slots = captured_shifts([1, -1], 2)

    def gradient(first, second):
        x = device_tensor(4, 6)
        u = x * 1
        (3 * first(u) + 7 * second(u)).sum().backward()
        return x.grad

    assert_same_bits([gradient(*slots)], [gradient(*layers)])


def test_returned_buffer_outlives_its_layer():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(6, 6).cuda()
            self.table = torch.full((1000,), 5.0, device="cuda")

        def forward(self, x):
            return self.linear(x), self.table

    layer = Layer()
    table = StorageWeakRef(layer.table.untyped_storage())
    (slot,) = make_graphed_callables(
        (layer,), ((device_tensor(4, 6),),), _order=[1, -1], _reuse_graph_input_output_buffers=True
    )
    layer.table = None
    gc.collect()
    assert not table.expired()
    assert slot(device_tensor(4, 6))[1].eq(5).all()
