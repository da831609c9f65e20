"""Test the order of replays of graphs that share memory: replays may be skipped but not reordered."""

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables

from .captured_cases import assert_same_bits, copies, device_tensor, mlp

pytestmark = pytest.mark.usefixtures("cpu_backend")
COUNT = 4
OVERWRITTEN = r"callable {} .*: a later replay has overwritten the activations"


def captured(microbatches=1, **options):
    """Capture layers with all micro-batches in flight; return the layers and their graphs by micro-batch."""
    torch.manual_seed(5)
    layers = [mlp(0) for _ in range(COUNT)]
    samples = [(device_tensor(4, 6),) for _ in range(COUNT * microbatches)]
    slots = make_graphed_callables(
        tuple(layers),
        samples,
        _order=[1] * microbatches + [-1] * microbatches,
        _num_layers_per_chunk=[COUNT],
        _reuse_graph_input_output_buffers=True,
        **options,
    )
    return layers, [slots[m * COUNT : (m + 1) * COUNT] for m in range(microbatches)]


def forward(layers, called, seed=0):
    """Run the layers with indices ``called`` in sequence; return the input and all outputs."""
    returned = [device_tensor(4, 6, seed=seed)]
    for index in called:
        returned.append(layers[index](returned[-1]))
    return returned


def gradients(loss, x, layers, **options):
    params = [param for layer in layers for param in layer.parameters()]
    return copies(list(torch.autograd.grad(loss, [x, *params], allow_unused=True, **options)))


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("called", [[0, 2, 3], [1, 3], [2]], ids=str)
def test_layers_may_be_left_out(microbatches, called):
    layers, slots = captured(microbatches)
    for step in range(2):
        trained: tuple[list, list] = [], []
        for numbers, calls in zip(trained, (slots, [layers] * microbatches), strict=True):
            # Only micro-batches with an even index skip layers.
            passes = [
                forward(calls[m], called if m % 2 == 0 else range(COUNT), seed=10 * step + m)
                for m in range(microbatches)
            ]
            for x, *between, output in passes:  # the loss also reads hidden states, as an auxiliary loss does
                loss = output.square().sum() + sum(hidden.cos().sum() for hidden in between)
                numbers.extend(gradients(loss, x, layers))
        assert_same_bits(*trained)


@pytest.mark.parametrize(
    ("called", "message"),
    [
        ([0, 2, 1, 3], OVERWRITTEN.format(2)),
        ([3, 2, 1, 0], OVERWRITTEN.format(1)),
        ([0, 1, 1, 2], OVERWRITTEN.format(1)),
        ([0, 1, 2, 3, 0], OVERWRITTEN.format(3)),
    ],
    ids=str,
)
def test_another_order_is_refused(called, message):
    layers, (slots,) = captured()
    x, *_, output = forward(slots, called)
    with pytest.raises(RuntimeError, match=message):
        gradients(output.sum(), x, layers)
    numbers = []
    for calls in (layers, slots):  # the next step is correct again
        x, *_, output = forward(calls, range(COUNT))
        numbers.append(gradients(output.sum(), x, layers))
    assert_same_bits(*numbers)


def test_another_order_of_micro_batches_is_refused():
    layers, slots = captured(microbatches=2)
    second = forward(slots[1], range(COUNT))
    forward(slots[0], range(COUNT))
    with pytest.raises(RuntimeError, match=OVERWRITTEN.format(3)):
        gradients(second[-1].sum(), second[0], layers)


def test_captures_into_one_pool_share_their_order():
    pool = torch.cuda.graph_pool_handle()
    layers = [make_graphed_callables(mlp(0), (device_tensor(4, 6),), pool=pool) for _ in range(2)]
    with pytest.raises(RuntimeError, match=OVERWRITTEN.format(0)):
        forward(layers, [0, 1])[-1].sum().backward()


def test_second_backward_needs_a_retained_graph():
    layers, (slots,) = captured()
    x, *_, output = forward(slots, range(COUNT))
    gradients(output.sum(), x, layers, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"callable 3 .* retain_graph_in_backward=True"):
        gradients(output.sum(), x, layers)


def test_backward_runs_twice_with_a_retained_graph():
    layers, (slots,) = captured(retain_graph_in_backward=True)
    x, *_, output = forward(layers, range(COUNT))
    expected = gradients(output.sum(), x, layers)
    x, *_, output = forward(slots, range(COUNT))
    for _ in range(2):
        assert_same_bits(gradients(output.sum(), x, layers, retain_graph=True), expected)
