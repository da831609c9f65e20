"""Test that replays of graphed callables are bit-identical to eager execution."""

import inspect

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from megatron.core.transformer._cuda_graphs.engine.plan import ordered_plan
from megatron.core.transformer._cuda_graphs.te.sample_inputs import sample_arguments

from .captured_cases import (
    CASES,
    Case,
    assert_same_bits,
    copies,
    descend,
    device_tensor,
    mlp,
    train,
)

pytestmark = pytest.mark.usefixtures("cpu_backend")


def test_signature_extends_transformer_engine():
    # Parameters of TransformerEngine 2.20.2's make_graphed_callables.
    *of_transformer_engine, owners = inspect.signature(make_graphed_callables).parameters.values()
    assert (owners.name, owners.default) == ("owners", None)
    expected = """
        modules sample_args num_warmup_iters allow_unused_input sample_kwargs fp8_enabled fp8_calibrating
        fp8_recipe fp8_group fp8_weight_caching enabled calibrating recipe amax_reduction_group
        cache_quantized_params _order _num_layers_per_chunk pool retain_graph_in_backward
        _reuse_graph_input_output_buffers clone_param_grads_on_return pre_warmup_hook post_warmup_hook
        capture_time_hooks
    """
    assert [parameter.name for parameter in of_transformer_engine] == expected.split()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_training_is_bit_identical_to_eager(case):
    assert_same_bits(train(case, make_graphed_callables), train(case, None))


@pytest.mark.parametrize(
    "options",
    [
        {"clone_param_grads_on_return": False},
        {"retain_graph_in_backward": True},
        {"num_warmup_iters": 0},
        {"allow_unused_input": True},
        {"_order": [1, -1]},
    ],
    ids=str,
)
def test_options_are_bit_identical_to_eager(options):
    def capture(func, args, sample_kwargs):
        return make_graphed_callables((func,), (args,), sample_kwargs=(sample_kwargs,), **options)[0]

    assert_same_bits(train(CASES["dropout"], capture), train(CASES["dropout"], None))


def test_negative_control_replay_that_does_nothing(monkeypatch):
    expected = train(CASES["dropout"], None)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)
    with pytest.raises(AssertionError, match="differs"):
        assert_same_bits(train(CASES["dropout"], make_graphed_callables), expected)


def test_replays_run_no_python_of_the_callable():
    calls = []

    def counted(x):
        calls.append(x)
        return x * 2

    graphed = make_graphed_callables(counted, (device_tensor(3),), num_warmup_iters=2)
    assert len(calls) == 3
    for seed in range(3):
        x = device_tensor(3, seed=seed)
        assert torch.equal(graphed(x), x * 2)
    assert len(calls) == 3


def train_chain(graphed):
    """Train two modules in sequence; return losses, gradients and the RNG state."""
    torch.manual_seed(3)
    modules = mlp(), mlp()
    params = [param for module in modules for param in module.parameters()]
    called = modules
    if graphed:
        called = make_graphed_callables(modules, tuple((device_tensor(4, 6, seed=9),) for _ in modules))
    numbers = []
    for step in range(3):
        x = device_tensor(4, 6, seed=step)
        loss = called[1](called[0](x)).square().sum()
        loss.backward()
        numbers += copies([loss, x.grad, *(param.grad for param in params)])
        descend(params)
    return [*numbers, torch.cuda.get_rng_state()]


def test_tuple_of_modules_is_bit_identical_to_eager():
    assert_same_bits(train_chain(graphed=True), train_chain(graphed=False))


INTERLEAVED, ONE_BY_ONE = [1, 2, 1, 2, -2, -1, -2, -1], [1, 2, -2, -1, 1, 2, -2, -1]


def train_pipeline(order, graphed, **options):
    """Train chunks of two layers and one layer with two micro-batches; return losses, gradients and the RNG state."""
    torch.manual_seed(3)
    layers = mlp(), mlp(), mlp()
    params = [param for layer in layers for param in layer.parameters()]
    chunks = {(c, m): layers[:2] if c == 1 else layers[2:] for c in (1, 2) for m in range(2)}
    if graphed:
        plan = ordered_plan(order, [2, 1], 3)
        samples = sample_arguments(plan, lambda index: ((device_tensor(4, 6, seed=9),), {}))
        slots = make_graphed_callables(
            layers, [args for args, _ in samples], _order=order, _num_layers_per_chunk=[2, 1], **options
        )
        chunks = {(1, 0): slots[0:2], (1, 1): slots[2:4], (2, 0): slots[4:5], (2, 1): slots[5:6]}
    numbers = []
    for step in range(3):
        count = dict.fromkeys(order, 0)
        inputs = [device_tensor(4, 6, seed=10 * step + m) for m in range(2)]
        hidden, losses = list(inputs), {}
        for chunk in order:
            microbatch = count[chunk]
            count[chunk] += 1
            if chunk > 0:
                for layer in chunks[chunk, microbatch]:
                    hidden[microbatch] = layer(hidden[microbatch])
                if chunk == 2:
                    losses[microbatch] = hidden[microbatch].square().sum()
            elif chunk == -2:  # also runs the backward pass of the first chunk
                losses[microbatch].backward()
                numbers += copies([losses[microbatch], inputs[microbatch].grad])
        numbers += copies([param.grad for param in params])
        descend(params)
    return [*numbers, torch.cuda.get_rng_state()]


@pytest.mark.parametrize("order", [INTERLEAVED, ONE_BY_ONE], ids=["interleaved", "one by one"])
@pytest.mark.parametrize("reuse", [False, True], ids=["own gradients", "shared gradients"])
def test_chunks_and_micro_batches_are_bit_identical_to_eager(order, reuse):
    graphed = train_pipeline(order, True, _reuse_graph_input_output_buffers=reuse)
    assert_same_bits(graphed, train_pipeline(order, False))


def test_module_given_twice_with_order_has_two_graphs():
    module = mlp(dropout=0)

    def gradients(first, second):
        x = device_tensor(4, 6, seed=2)
        second(first(x)).sum().backward()
        found = copies([x.grad, *(param.grad for param in module.parameters())])
        module.zero_grad()
        return found

    samples = tuple((device_tensor(4, 6),) for _ in range(2))
    slots = make_graphed_callables((module, module), samples, _order=[1, -1])
    assert_same_bits(gradients(*slots), gradients(module, module))


class _Checkpointed(torch.nn.Module):
    """Recomputes a layer in its backward pass, and optionally also uses the layer's bias without recomputation."""

    def __init__(self, also_outside: bool):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6).cuda()
        self.also_outside = also_outside

    def forward(self, x):
        y = checkpoint(self.inner, x, use_reentrant=True, preserve_rng_state=False)
        return y * self.inner.bias if self.also_outside else y


@pytest.mark.parametrize("also_outside", [False, True], ids=["recomputed", "recomputed and used outside"])
def test_nested_backward_is_bit_identical_to_eager(also_outside):
    case = Case(lambda: _Checkpointed(also_outside))
    assert_same_bits(train(case, make_graphed_callables), train(case, None))


def test_gradients_from_before_capture_are_preserved():
    module = _Checkpointed(False)
    params = list(module.parameters())
    module(device_tensor(4, 6)).square().sum().backward()
    expected = copies([param.grad for param in params])
    kept = [param.grad for param in params]
    graphed = make_graphed_callables(module, (device_tensor(4, 6),))
    assert all(param.grad is grad for param, grad in zip(params, kept, strict=True))
    assert_same_bits(kept, expected)
    for param in params:
        param.grad = None
    graphed(device_tensor(4, 6)).square().sum().backward()
    assert_same_bits([param.grad for param in params], expected)


def test_second_derivatives_are_refused():
    graphed = make_graphed_callables(lambda x: x * x * x, (device_tensor(3),))
    x = device_tensor(3)
    with pytest.raises(RuntimeError, match=r"callable 0 .* do not support create_graph=True"):
        torch.autograd.grad(graphed(x).sum(), x, create_graph=True)
