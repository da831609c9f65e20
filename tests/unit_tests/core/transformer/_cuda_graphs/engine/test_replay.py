"""Test replays of graphed callables: returned memory, inputs and errors."""

import copy
from typing import Any

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables

from .captured_cases import CASES, Case, Forward, assert_same_bits, copies, device_tensor, mlp, product, train

pytestmark = pytest.mark.usefixtures("cpu_backend")


def test_next_replay_overwrites_outputs_and_input_gradients():
    graphed = make_graphed_callables(lambda x: x * x, (device_tensor(3),))
    results = []
    for value in (2.0, 3.0):
        x = torch.full((3,), value, device="cuda", requires_grad=True) * 1  # non-leaf: gradients of leaves are copied
        output = graphed(x)
        results.append((output, *torch.autograd.grad(output.sum(), x)))
    assert [[tensor[0].item() for tensor in result] for result in results] == [[9.0, 6.0], [9.0, 6.0]]


def test_grad_of_a_leaf_outlives_the_next_replay():
    graphed = make_graphed_callables(lambda x: x * x, (device_tensor(3),))
    first, second = (torch.full((3,), value, device="cuda", requires_grad=True) for value in (2.0, 3.0))
    for x in (first, second):
        graphed(x).sum().backward()
    assert (first.grad.tolist(), second.grad.tolist()) == ([4.0] * 3, [6.0] * 3)


def test_hook_of_unused_parameter_does_not_run():
    case = CASES["an unused parameter"]
    module: Any = case.make()
    called: list[str] = []
    for name, param in module.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: called.append(name))
    graphed = make_graphed_callables(module, case.args(0))
    assert called == []
    graphed(*case.args(1)).sum().backward()
    assert sorted(called) == ["used.bias", "used.weight"]
    assert len(graphed.forward.params) == 2


def test_parameter_hook_runs_on_replayed_gradient():
    def hooked() -> torch.nn.Module:
        module = mlp()
        for param in module.parameters():
            param.register_hook(lambda grad: grad * 3)
        return module

    case = Case(hooked)
    assert_same_bits(train(case, make_graphed_callables), train(case, None))


class _Late(torch.nn.Module):
    """Uses its second layer from the second call on."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6).cuda(), torch.nn.Linear(6, 6).cuda()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.first(x) if self.calls == 1 else self.second(self.first(x))


def test_parameter_used_from_second_call_on_gets_gradient():
    module = make_graphed_callables(_Late(), (device_tensor(4, 6),))
    module(device_tensor(4, 6)).sum().backward()
    assert all(param.grad is not None for param in module.parameters())


def test_input_with_other_strides_is_copied():
    graphed = make_graphed_callables(lambda x: (x * 2, x), (device_tensor(4, 4, grad=False),))
    _, static = graphed(device_tensor(4, 4, seed=1, grad=False))
    expected = static.t().clone() * 2
    assert torch.equal(graphed(static.t())[0], expected)


class _Doubled(torch.autograd.Function):
    """Doubles its input; appends the output gradient of each eager or captured backward pass to ``noted``."""

    @staticmethod
    def forward(ctx, x, noted):
        ctx.noted = noted
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.noted.append(grad.detach())
        return grad * 2, None


@pytest.mark.parametrize("view", [torch.t, torch.clone])
def test_gradient_with_other_strides_is_copied(view):
    x, grad = (torch.randn(4, 4, device="cuda") for _ in range(2))
    x.requires_grad_()
    noted: list[torch.Tensor] = []
    graphed = make_graphed_callables(lambda x: _Doubled.apply(x, noted), (x.detach().requires_grad_(),))
    static = noted[-1]
    torch.autograd.grad(graphed(x), x, grad)
    assert torch.equal(static, grad)
    (computed,) = torch.autograd.grad(graphed(x), x, view(static))
    assert torch.equal(computed, 2 * view(grad))


def test_tensor_captured_twice_may_be_two_in_a_replay():
    x, a, b = (device_tensor(3, seed=seed) for seed in range(3))
    graphed = make_graphed_callables(lambda x, *, y: 2 * x + 3 * y, (x,), sample_kwargs={"y": x})
    output = graphed(a, y=b)
    assert torch.equal(output, 2 * a + 3 * b)
    output.sum().backward()
    assert (a.grad[0], b.grad[0]) == (2, 3)


def run_two(calls, backwards, grad=True) -> list:
    """Call two callables, run their backward passes in the order ``backwards``, and return outputs and gradients."""
    inputs = [device_tensor(4, 6, seed=seed, grad=grad) for seed in (1, 2)]
    outputs = [call(x) for call, x in zip(calls, inputs, strict=True)]
    numbers = copies(outputs)
    for index in backwards:
        outputs[index].sum().backward()
    return numbers + copies([x.grad for x in inputs])


def gated(linear, x):
    return linear(x) * x


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        (2, {}),
        (2, {"_order": [1, -1], "_reuse_graph_input_output_buffers": True}),
        (1, {"_order": [1, 1, -1, -1]}),
    ],
    ids=["unordered", "layers that share", "micro-batches"],
)
@pytest.mark.parametrize("grad", [True, False])
def test_sample_given_twice_is_not_shared(layers, options, grad):
    x, modules = device_tensor(4, 6, grad=grad), tuple(Forward(gated) for _ in range(layers))
    copied = copy.deepcopy(modules)
    backwards = [1, 0] if layers == 2 else [0, 1]  # as in capture
    graphed = make_graphed_callables(modules, ((x,), (x,)), **options)
    assert_same_bits(run_two(graphed, backwards, grad), run_two([copied[0], copied[-1]], backwards, grad))
    for module, eager in zip(modules, copied, strict=True):
        assert_same_bits(*([param.grad for param in each.parameters()] for each in (module, eager)))


def test_module_in_other_mode_runs_eagerly():
    module, x = mlp(dropout=0.5), device_tensor(4, 6)
    expected = module.eval()(x).detach().clone()
    graphed = make_graphed_callables(module.train(), (device_tensor(4, 6, seed=1),))
    assert torch.equal(graphed.eval()(x), expected)
    assert not torch.equal(graphed.train()(x), expected)


def test_evaluation_mode_has_no_backward_graph():
    module, x = mlp().eval(), device_tensor(4, 6)
    expected = module(x).detach().clone()
    output = make_graphed_callables(module, (device_tensor(4, 6, seed=1),))(x)
    assert torch.equal(output, expected)
    with pytest.raises(RuntimeError, match=r"callable 0 \(Sequential\) has no backward graph"):
        output.sum().backward()


def test_capture_without_grad_keeps_gradients():
    case = CASES["dropout"]
    assert_same_bits(train(case, torch.no_grad()(make_graphed_callables)), train(case, None))


def test_only_other_keywords_without_tensors_are_ignored():
    graphed = make_graphed_callables(lambda x: x * 2, (device_tensor(3),))
    assert torch.equal(graphed(device_tensor(3), is_first_microbatch=True, mask=None), device_tensor(3) * 2)
    with pytest.raises(TypeError, match=r"callable 0 \(<lambda>\) was captured without the keyword 'mask'"):
        graphed(device_tensor(3), mask=device_tensor(3))


@pytest.fixture
def with_keywords():
    case = CASES["keywords"]
    return make_graphed_callables(case.make(), case.args(0), sample_kwargs=case.kwargs(0)), case


def test_missing_keyword_is_named(with_keywords):
    graphed, case = with_keywords
    with pytest.raises(TypeError, match=r"callable 0 \(Forward\) was captured with the keyword 'scale': pass it"):
        graphed(*case.args(1), shift=case.kwargs(1)["shift"])


@pytest.mark.parametrize(
    "other", [lambda: device_tensor(3, 6), lambda: device_tensor(4, 6).double()], ids=["shape", "dtype"]
)
def test_input_of_another_shape_or_dtype_is_refused(with_keywords, other):
    graphed, case = with_keywords
    with pytest.raises(ValueError, match=r"callable 0 \(Forward\) was captured with input 0 of \(4, 6\) torch.float32"):
        graphed(other(), **case.kwargs(1))


def test_input_that_newly_requires_grad_is_refused():
    graphed = make_graphed_callables(product, (device_tensor(4, 6), device_tensor(4, 6, grad=False)))
    x, y = device_tensor(4, 6), device_tensor(4, 6)
    with pytest.raises(ValueError, match=r"callable 0 \(product\): input 1 requires grad, but did not at capture"):
        graphed(x, y)
    with torch.no_grad():
        assert torch.equal(graphed(x, y), product(x, y))
