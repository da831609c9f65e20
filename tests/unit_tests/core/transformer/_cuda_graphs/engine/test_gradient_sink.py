"""Test backward graphs that write parameter gradients to a sink instead of returning them to autograd."""

from typing import Any

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables

from .captured_cases import CASES, assert_same_bits, copies, device_tensor, mlp
from .sinks import Buckets, replays

pytestmark = pytest.mark.usefixtures("cpu_backend")


def eager_gradients(module, *args):
    """Return the eager gradient of each parameter, or zeros if the parameter is unused."""
    grads = torch.autograd.grad(module(*args).square().sum(), list(module.parameters()), allow_unused=True)
    return [
        torch.zeros_like(param) if grad is None else grad
        for param, grad in zip(module.parameters(), grads, strict=True)
    ]


def test_owner_consumes_gradients_of_every_replay():
    module = mlp(dropout=0.0)
    sink, inputs = Buckets(module), [device_tensor(4, 6, seed=seed) for seed in (1, 2)]
    expected = [eager_gradients(module, x) for x in inputs]
    graphed = make_graphed_callables(module, (device_tensor(4, 6),), owners=[sink])
    for x, grads in zip(inputs, expected, strict=True):
        graphed(x).square().sum().backward()
        assert_same_bits(copies(sink.grads), copies(grads))


def test_autograd_gets_no_consumed_gradient():
    called: list[torch.Tensor] = []
    module = mlp()
    for param in module.parameters():
        param.register_post_accumulate_grad_hook(called.append)
    graphed = make_graphed_callables(module, (device_tensor(4, 6),), owners=[Buckets(module)])
    x = device_tensor(4, 6, seed=1)
    graphed(x).square().sum().backward()
    assert [param.grad for param in module.parameters()] == [None] * 4
    assert called == []
    assert x.grad is not None


def test_gradient_of_unused_parameter_is_none():
    module: Any = CASES["an unused parameter"].make()
    sink, expected = Buckets(module), eager_gradients(module, device_tensor(4, 6))
    graphed = make_graphed_callables(module, (device_tensor(4, 6),), owners=[sink])
    assert sink.shapes == [[None, None, (6, 6), (6,)]]
    graphed(device_tensor(4, 6)).square().sum().backward()
    assert_same_bits(copies(sink.grads), copies(expected))


def test_autograd_gets_unconsumed_gradients():
    module = mlp(dropout=0.0)
    x = device_tensor(4, 6, seed=1)
    expected = eager_gradients(module, x)
    sink = Buckets(module, takes=lambda param: param.dim() == 2)
    graphed = make_graphed_callables(module, (device_tensor(4, 6),), owners=[sink])
    graphed(x).square().sum().backward()
    got = [grad if param.grad is None else param.grad for param, grad in zip(sink.params, sink.grads, strict=True)]
    assert [param.grad is None for param in sink.params] == [True, False, True, False]
    assert_same_bits(copies(got), copies(expected))


def test_backward_runs_if_no_input_requires_grad():
    case = CASES["inputs without grad"]
    module: Any = case.make()
    (indices,) = case.args(1)
    expected = eager_gradients(module, indices)
    sink = Buckets(module)
    graphed = make_graphed_callables(module, case.args(0), owners=[sink])
    output = graphed(indices)
    with replays() as replayed:
        output.square().sum().backward()
    assert len(replayed) == 1
    assert_same_bits(copies(sink.grads), copies(expected))
