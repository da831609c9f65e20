"""Replays of graphed callables: the memory of what they return, their inputs, and what they refuse."""

import copy
from typing import Any

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables

from .captured_cases import (
    CASES,
    Case,
    Forward,
    assert_same_bits,
    copies,
    device_tensor,
    frozen_mlp,
    mlp,
    product,
    train,
)

pytestmark = pytest.mark.usefixtures("cpu_backend")


# ------------------------------------------------------------------------------------------------- returned memory


def gradients(graphed, params, seed):
    return torch.autograd.grad(graphed(device_tensor(4, 6, seed=seed)).square().sum(), params)


def test_without_clones_the_next_replay_overwrites_parameter_gradients():
    module = mlp(dropout=0.0)
    graphed = make_graphed_callables(module, (device_tensor(4, 6),), clone_param_grads_on_return=False)
    first = gradients(graphed, list(module.parameters()), 1)
    second = gradients(graphed, list(module.parameters()), 2)
    assert [grad.data_ptr() for grad in first] == [grad.data_ptr() for grad in second]
    assert_same_bits(list(first), list(second))


def test_the_next_replay_overwrites_outputs_and_gradients_of_inputs():
    graphed = make_graphed_callables(lambda x: x * x, (device_tensor(3),))
    results = []
    for value in (2.0, 3.0):
        x = torch.full((3,), value, device="cuda", requires_grad=True) * 1  # the gradient of a leaf is copied
        output = graphed(x)
        results.append((output, *torch.autograd.grad(output.sum(), x)))
    assert [[tensor[0].item() for tensor in result] for result in results] == [[9.0, 6.0], [9.0, 6.0]]


def test_grad_of_a_leaf_input_survives_a_replay_on_another():
    graphed = make_graphed_callables(lambda x: x * x, (device_tensor(3),))
    first, second = (torch.full((3,), value, device="cuda", requires_grad=True) for value in (2.0, 3.0))
    for x in (first, second):
        graphed(x).sum().backward()
    assert (first.grad.tolist(), second.grad.tolist()) == ([4.0] * 3, [6.0] * 3)


def test_a_module_that_is_used_twice_in_a_pass_is_refused_in_backward():
    module = make_graphed_callables(mlp(), (device_tensor(4, 6),))
    with pytest.raises(RuntimeError, match="A graph serves one forward pass at a time"):
        module(module(device_tensor(4, 6))).sum().backward()


def test_forward_passes_without_backward_leave_the_next_step_alone():
    module = make_graphed_callables(mlp(dropout=0), (device_tensor(4, 6),))
    x = device_tensor(4, 6, seed=3)
    expected = torch.autograd.grad(module(x).sum(), x)
    module(device_tensor(4, 6, seed=4))
    with torch.no_grad():
        module(device_tensor(4, 6, seed=5))
    assert_same_bits(list(torch.autograd.grad(module(x).sum(), x)), list(expected))


def test_a_hook_of_an_unused_parameter_does_not_run_at_replay():
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


def test_a_hook_of_a_parameter_runs_on_the_gradient_that_a_replay_returns():
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


def test_a_parameter_that_warm_up_uses_late_gets_its_gradient():
    module = make_graphed_callables(_Late(), (device_tensor(4, 6),))
    module(device_tensor(4, 6)).sum().backward()
    assert all(param.grad is not None for param in module.parameters())


# ------------------------------------------------------------------------------------------------- how to replay


def test_a_tensor_at_the_static_address_is_copied_if_its_strides_differ():
    graphed = make_graphed_callables(lambda x: (x * 2, x), (device_tensor(4, 4, grad=False),))
    _, static = graphed(device_tensor(4, 4, seed=1, grad=False))
    expected = static.t().clone() * 2
    assert torch.equal(graphed(static.t())[0], expected)


class _Doubled(torch.autograd.Function):
    """Twice its input; notes the gradients of its output, in capture the static one."""

    @staticmethod
    def forward(ctx, x, noted):
        ctx.noted = noted
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.noted.append(grad.detach())
        return grad * 2, None


@pytest.mark.parametrize("view", [torch.t, torch.clone])
def test_a_gradient_at_the_static_address_is_copied_if_it_is_another_view_of_it(view):
    x, grad = (torch.randn(4, 4, device="cuda") for _ in range(2))
    x.requires_grad_()
    noted: list[torch.Tensor] = []
    graphed = make_graphed_callables(lambda x: _Doubled.apply(x, noted), (x.detach().requires_grad_(),))
    static = noted[-1]
    torch.autograd.grad(graphed(x), x, grad)
    assert torch.equal(static, grad)
    (computed,) = torch.autograd.grad(graphed(x), x, view(static))
    assert torch.equal(computed, 2 * view(grad))


def test_a_tensor_that_capture_is_given_twice_may_be_two_in_a_replay():
    x, a, b = (device_tensor(3, seed=seed) for seed in range(3))
    graphed = make_graphed_callables(lambda x, *, y: 2 * x + 3 * y, (x,), sample_kwargs={"y": x})
    output = graphed(a, y=b)
    assert torch.equal(output, 2 * a + 3 * b)
    output.sum().backward()
    assert (a.grad[0], b.grad[0]) == (2, 3)


def run_two(calls, backwards) -> list:
    """Outputs and gradients of two calls on inputs of their own; ``backwards`` is the order of backward passes."""
    inputs = [device_tensor(4, 6, seed=seed) for seed in (1, 2)]
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
        (2, {"_order": [1, -1]}),
        (2, {"_order": [1, -1], "_reuse_graph_input_output_buffers": True}),
        (1, {"_order": [1, 1, -1, -1]}),
        (1, {"_order": [1, 1, -1, -1], "_reuse_graph_input_output_buffers": True}),
    ],
    ids=["unordered", "layers", "layers that share", "micro-batches", "micro-batches that share"],
)
def test_one_sample_input_for_several_callables_is_no_input_in_common(layers, options):
    x, modules = device_tensor(4, 6), tuple(Forward(gated) for _ in range(layers))
    calls = [copy.deepcopy(modules[index % layers]) for index in range(2)]
    backwards = [1, 0] if layers == 2 else [0, 1]  # as in capture
    graphed = make_graphed_callables(modules, ((x,), (x,)), **options)
    assert_same_bits(run_two(graphed, backwards), run_two(calls, backwards))


def test_a_module_in_the_other_mode_runs_eagerly():
    module, x = mlp(dropout=0.5), device_tensor(4, 6)
    expected = module.eval()(x).detach().clone()
    graphed = make_graphed_callables(module.train(), (device_tensor(4, 6, seed=1),))
    assert torch.equal(graphed.eval()(x), expected)
    assert not torch.equal(graphed.train()(x), expected)


def test_modules_captured_in_evaluation_mode_have_no_backward():
    module, x = mlp().eval(), device_tensor(4, 6)
    expected = module(x).detach().clone()
    output = make_graphed_callables(module, (device_tensor(4, 6, seed=1),))(x)
    assert torch.equal(output, expected)
    with pytest.raises(RuntimeError, match=r"callable 0 \(Sequential\) has no backward graph"):
        output.sum().backward()


@pytest.mark.parametrize("with_event", [False, True])
def test_a_replay_runs_on_the_stream_it_is_given(monkeypatch, with_event):
    graphed = make_graphed_callables(lambda x: x * 2, (device_tensor(3),))
    stream, outer = torch.cuda.Stream(), torch.cuda.current_stream()
    event = torch.cuda.Event() if with_event else None
    used = []
    replay = torch.cuda.CUDAGraph.replay

    def recorded(graph):
        used.append(torch.cuda.current_stream())
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", recorded)
    if event is not None:
        event.record(stream)
    x = device_tensor(3, seed=4)
    output = graphed(x, cuda_graph_stream=stream, cuda_graph_event=event)
    output.sum().backward()
    assert used == [stream, stream]
    assert torch.cuda.current_stream() == outer
    assert torch.equal(output, x * 2)


def test_keywords_that_were_not_captured_are_ignored():
    graphed = make_graphed_callables(lambda x: x * 2, (device_tensor(3),))
    assert torch.equal(graphed(device_tensor(3), is_first_microbatch=True), device_tensor(3) * 2)


# ------------------------------------------------------------------------------------------- errors of a replay


@pytest.fixture
def with_keywords():
    case = CASES["keywords"]
    return make_graphed_callables(case.make(), case.args(0), sample_kwargs=case.kwargs(0)), case


def test_a_missing_keyword_is_named(with_keywords):
    graphed, case = with_keywords
    with pytest.raises(TypeError, match=r"callable 0 \(Forward\) was captured with the keyword 'scale'"):
        graphed(*case.args(1), shift=case.kwargs(1)["shift"])


@pytest.mark.parametrize(
    "other", [lambda: device_tensor(3, 6), lambda: device_tensor(4, 6).double()], ids=["shape", "dtype"]
)
def test_an_input_unlike_the_captured_one_is_refused(with_keywords, other):
    graphed, case = with_keywords
    with pytest.raises(ValueError, match=r"callable 0 \(Forward\) was captured with input 0 of \(4, 6\) torch.float32"):
        graphed(other(), **case.kwargs(1))


def test_an_input_that_requires_grad_and_did_not_at_capture_is_refused():
    graphed = make_graphed_callables(product, (device_tensor(4, 6), device_tensor(4, 6, grad=False)))
    x, y = device_tensor(4, 6), device_tensor(4, 6)
    with pytest.raises(ValueError, match=r"callable 0 \(product\) was captured with input 1 that requires no grad"):
        graphed(x, y)
    with torch.no_grad():
        assert torch.equal(graphed(x, y), product(x, y))


def test_a_parameter_that_was_replaced_since_capture_is_refused_by_name():
    module = make_graphed_callables(mlp(), (device_tensor(4, 6),))
    module[0].weight = torch.nn.Parameter(torch.zeros_like(module[0].weight))
    with pytest.raises(RuntimeError, match=r"changed since capture: parameter weight of 0; .*callable 0 \(Sequential"):
        module(device_tensor(4, 6))


def test_a_parameter_that_was_unfrozen_since_capture_is_refused():
    module = make_graphed_callables(frozen_mlp(), (device_tensor(4, 6),))
    module[0].weight.requires_grad_()
    with pytest.raises(RuntimeError, match=r"requires_grad of a parameter of shape \(8, 6\)"):
        module(device_tensor(4, 6))
    with torch.no_grad():
        module(device_tensor(4, 6))
