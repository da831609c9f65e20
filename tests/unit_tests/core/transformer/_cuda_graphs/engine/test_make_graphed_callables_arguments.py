"""Test the errors of make_graphed_callables for unsupported arguments."""

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables

from .captured_cases import Forward, device_tensor, mlp

pytestmark = pytest.mark.usefixtures("cpu_backend")


def double(x):
    return x * 2


def uses_the_first(x, y):
    return x * 2


def capture(func=double, args=None, **options):
    return make_graphed_callables(func, (device_tensor(3),) if args is None else args, **options)


def inputs(count):
    return tuple((device_tensor(3),) for _ in range(count))


def twice():
    module = torch.nn.Linear(3, 3).cuda()
    return capture((module, torch.nn.Linear(3, 3).cuda(), module), inputs(3))


def contains_graphs():
    parent = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).cuda()
    capture(parent[1], (device_tensor(2, 3),))
    return capture(parent, (device_tensor(2, 3),))


def trained_buffer():
    module = mlp()
    module.register_buffer("scale", device_tensor(1))
    return capture(module, (device_tensor(4, 6),))


def cached_autocast():
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=True):
        return capture()


def parameter_outside():
    linear = torch.nn.Linear(3, 3, bias=False).cuda()
    return capture(lambda x: linear(x) * x, (device_tensor(2, 3),))


def output_outside():
    outside = device_tensor(3)
    return capture(lambda x: (x * 2, outside))


def parameter_of_another_module():
    other = torch.nn.Linear(6, 6, bias=False).cuda()
    return capture(Forward(lambda linear, x: other(linear(x))), (device_tensor(4, 6),))


def bound_method():
    return capture(torch.nn.Linear(3, 3).cuda().forward, (device_tensor(2, 3),))


BOTH = (double, double)
REFUSED = {
    "a keyword that is not a tensor": (
        *(TypeError, r"sample input 'mask' of callable 0 \(double\) contains 2: pass tensors only"),
        lambda: capture(sample_kwargs={"mask": 2}),
    ),
    "an input that is not a tensor": (
        *(TypeError, r"sample input 1 of callable 0 \(double\) contains None: pass tensors only"),
        lambda: capture(args=(device_tensor(3), [None])),
    ),
    "an output that is not a tensor": (
        *(TypeError, r"callable 0 \(<lambda>\) returned 3: return tensors and None only"),
        lambda: capture(lambda x: (x * 2, 3)),
    ),
    "few sample_args": (ValueError, "must have 2 entries, got 1", lambda: capture(BOTH, inputs(1))),
    "one dict of sample_kwargs": (
        *(TypeError, "sample_kwargs must be a list with one entry per callable, got the dict"),
        lambda: capture(BOTH, inputs(2), sample_kwargs={"a": 1, "b": 2}),
    ),
    "an order for other callables": (
        *(ValueError, "_num_layers_per_chunk is"),
        lambda: capture((double,), inputs(1), _order=[1, -1], _num_layers_per_chunk=[2]),
    ),
    "sharing without an order": (
        *(ValueError, "_reuse_graph_input_output_buffers requires _order"),
        lambda: capture(_reuse_graph_input_output_buffers=True),
    ),
    "no callables": (ValueError, "modules is empty", lambda: capture(())),
    "a tensor as sample_args": (TypeError, "sample_args of .* is a tensor", lambda: capture(args=device_tensor(3))),
    "None as sample_kwargs": (
        *(TypeError, "sample_kwargs of callable 0 .* must be a dict, got None"),
        lambda: capture(BOTH, inputs(2), sample_kwargs=(None, {})),
    ),
    "a list of callables": (TypeError, "a tuple of callables, got list", lambda: capture([double])),
    "a module twice": (ValueError, "a module is given twice: pass _order", twice),
    "a module in a graphed one": (RuntimeError, r"callable 0 \(Sequential\) already has graphs, in L", contains_graphs),
    "an unused input": (
        *(
            RuntimeError,
            r"callable 0 \(uses_the_first\) does not use one of its inputs .*index 1 .*allow_unused_input",
        ),
        lambda: capture(uses_the_first, (device_tensor(3), device_tensor(3))),
    ),
    "modules in both modes": (
        *(RuntimeError, "some modules are in training mode and some in evaluation mode"),
        lambda: capture((mlp(), mlp().eval()), ((device_tensor(4, 6),), (device_tensor(4, 6),))),
    ),
    "a buffer that requires grad": (RuntimeError, "has a buffer that requires grad", trained_buffer),
    "autocast that caches": (RuntimeError, r"use torch\.autocast\(\.\.\., cache_enabled=False\)", cached_autocast),
    "a parameter outside": (RuntimeError, r"uses a tensor of shape \(3, 3\)", parameter_outside),
    "an output outside": (RuntimeError, r"uses a tensor of shape \(3,\) that requires grad", output_outside),
    "another module's parameter": (RuntimeError, r"a tensor of shape \(6, 6\)", parameter_of_another_module),
    "an input written in place": (
        *(RuntimeError, r"callable 0 \(<lambda>\) writes scale in place, .*: clone it first"),
        lambda: capture(lambda x, *, scale: x * scale.add_(1), sample_kwargs={"scale": device_tensor(3, grad=False)}),
    ),
    "a method of a module": (RuntimeError, r"uses a tensor of shape .* capture the module", bound_method),
}


@pytest.mark.parametrize(("kind", "message", "call"), REFUSED.values(), ids=REFUSED)
def test_invalid_call_is_refused(kind, message, call):
    with pytest.raises(kind, match=message):
        call()


def test_unused_input_gets_no_gradient_if_allowed():
    graphed = capture(uses_the_first, (device_tensor(3), device_tensor(3)), allow_unused_input=True)
    x, y = device_tensor(3), device_tensor(3)
    graphed(x, y).sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    assert y.grad is None


def test_inputs_nested_differently_are_refused():
    a, b = device_tensor(3, seed=1), device_tensor(3, seed=2)
    graphed = capture(lambda pair: pair["a"] - pair["b"], ({"a": a, "b": b},))
    assert torch.equal(graphed({"a": b, "b": a}), b - a)
    with pytest.raises(TypeError, match=r"of structure \({'a': 0, 'b': 1},\), but called with \(\[0, 1\],\)"):
        graphed([a, b])


def test_leaf_made_in_forward_is_captured():
    def with_leaf(linear, x):
        return linear(x) + torch.zeros(6, device="cuda", requires_grad=True)

    module, x = Forward(with_leaf), device_tensor(4, 6)
    expected = module(x)
    assert torch.equal(capture(module, (device_tensor(4, 6, seed=1),))(x), expected)
