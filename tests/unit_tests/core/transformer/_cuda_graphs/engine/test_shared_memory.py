"""make_graphed_callables: memory that graphs share, and memory that is not theirs."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables

from .captured_cases import Forward, assert_same_bits, device_tensor, mlp

pytestmark = pytest.mark.usefixtures("cpu_backend")


def captured_for_sharing(order, shares=True, layers=2):
    """Slots of equal layers, each with inputs of its own at first."""
    count = layers * max(order.count(1), 1)
    samples = [(device_tensor(4, 6, seed=slot),) for slot in range(count)]
    modules = tuple(mlp() for _ in range(layers))
    return make_graphed_callables(
        modules, samples, _order=order, _num_layers_per_chunk=[layers], _reuse_graph_input_output_buffers=shares
    )


def test_static_inputs_are_shared_once_the_last_pass_that_reads_them_is_over():
    slots = captured_for_sharing([1, -1, 1, -1], layers=1)
    assert slots[0].inputs[0] is slots[1].inputs[0]


def test_static_inputs_are_not_shared_while_both_are_needed():
    slots = captured_for_sharing([1, 1, -1, -1], layers=1)
    assert slots[0].inputs[0] is not slots[1].inputs[0]


@pytest.mark.parametrize("shares", [True, False])
def test_outputs_keep_their_memory_only_where_it_is_not_shared(shares):
    (slot,) = captured_for_sharing([1, -1], shares, layers=1)
    address = slot.outputs[0].data_ptr()
    uses = torch._C._storage_Use_Count(slot.outputs[0].untyped_storage()._cdata)
    assert slot(device_tensor(4, 6)).data_ptr() == address
    # The pool of the CPU backend holds all memory; an output that holds it too has a storage in common with the pool.
    assert (uses <= 2) is shares


@pytest.mark.parametrize("shares", [True, False])
def test_in_evaluation_too_outputs_keep_their_memory_only_where_it_is_not_shared(shares):
    module, x = mlp().eval(), device_tensor(4, 6, seed=3)
    sample = (device_tensor(4, 6),)
    (slot,) = make_graphed_callables((module,), (sample,), _order=[1, -1], _reuse_graph_input_output_buffers=shares)
    uses = torch._C._storage_Use_Count(slot.outputs[0].untyped_storage()._cdata)
    assert (uses <= 2) is shares
    assert torch.equal(slot(x), module(x))


def test_a_replay_overwrites_the_gradients_that_the_backward_before_it_returned_where_memory_is_shared():
    slots = captured_for_sharing([1, -1], layers=3)
    inputs = [device_tensor(4, 6, seed=slot) * 1 for slot in range(3)]  # gradients of leaves are copied
    outputs = [slot(x) for slot, x in zip(slots, inputs, strict=True)]
    grads = []
    for x, output in zip(reversed(inputs), reversed(outputs), strict=True):
        grads += torch.autograd.grad(output.sum(), x)
    assert [bool(grad.isnan().any()) for grad in grads] == [True, False, False]


# ------------------------------------------------------------------------------------- gradients that are handed on


def shifted(linear, x):
    """Its backward pass returns the very gradient that it is given."""
    return x + linear.bias


def captured_shifts(order, count, **options):
    layers = tuple(Forward(shifted) for _ in range(count))
    samples = [(device_tensor(4, 6, seed=slot),) for slot in range(count * order.count(1))]
    return layers, make_graphed_callables(
        layers, samples, _order=order, _reuse_graph_input_output_buffers=True, **options
    )


def test_a_gradient_that_backward_hands_on_stays_until_the_next_backward_is_over(monkeypatch):
    _, slots = captured_shifts([1, 1, -1, -1], 1)
    inputs = [device_tensor(4, 6, seed=slot) for slot in range(2)]
    first, second = (slot(x) for slot, x in zip(slots, inputs, strict=True))
    (grad,) = torch.autograd.grad(first, inputs[0], torch.full_like(first, 3))
    torch.autograd.grad(second, inputs[1], torch.full_like(second, 7))
    assert_same_bits([grad], [torch.full_like(grad, 3)])


def test_layers_side_by_side_that_hand_on_gradients_are_bit_equal_to_eager():
    layers, slots = captured_shifts([1, -1], 2)

    def gradient(first, second):
        x = device_tensor(4, 6)
        u = x * 1
        (3 * first(u) + 7 * second(u)).sum().backward()
        return x.grad

    assert_same_bits([gradient(*slots)], [gradient(*layers)])


# --------------------------------------------------------------------------------- memory that is older than graphs


def test_what_a_layer_returns_of_its_own_stays_whatever_becomes_of_the_layer():
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
