"""Test that a capture preserves existing memory, and that its replays are bit-identical to eager."""

import pytest
import torch

from .conftest import capture


def test_capture_restores_existing_memory():
    x = torch.ones(4, device="cuda")
    buffer = torch.arange(8.0, device="cuda")
    graph, _ = capture(lambda: buffer[2:6].add_(x))
    assert buffer.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    graph.replay()
    assert buffer.tolist() == [0, 1, 3, 4, 5, 6, 6, 7]


def test_replay_reads_the_captured_address():
    parameter = torch.nn.Parameter(torch.ones(2, device="cuda"))
    old = parameter.data
    graph, y = capture(lambda: parameter * 3)
    parameter.data = torch.full((2,), 100.0, device="cuda")
    graph.replay()
    assert y.tolist() == [3, 3]
    old.fill_(2)
    graph.replay()
    assert y.tolist() == [6, 6]


def test_autograd_is_recorded():
    x = torch.ones(3, device="cuda", requires_grad=True)
    weight = torch.full((3,), 4.0, device="cuda", requires_grad=True)
    graph, (grad,) = capture(lambda: torch.autograd.grad((x * weight).tanh().sum(), [x]))
    with torch.no_grad():
        weight.fill_(0.5)
    graph.replay()
    expected = torch.autograd.grad((x * weight).tanh().sum(), [x])[0]
    assert torch.equal(grad, expected)


def test_meta_tensors_are_not_recorded():
    x = torch.ones(4, 2, device="cuda").t()

    def body():
        like = torch.empty_like(x, device="meta")
        return like, like + 1, x * 2

    graph, (like, sum_, y) = capture(body)
    assert graph.op_count == 1
    assert like.is_meta
    assert sum_.is_meta
    assert like.stride() == x.stride()
    graph.replay()
    assert torch.equal(y, torch.full((2, 4), 2.0))


def whole_lists(x):
    parts = [x.clone(), x.clone() * 2]
    torch._foreach_mul_(parts, 3.0)
    return torch._foreach_add(parts, 1.0)


def python_numbers(x):
    y = x.clone()
    y[0] = 5.0
    y[x > 0] = -1.0
    return torch.where(x > 0, y, 0.25)


def integers(x):
    index = x.argsort(dim=1)
    return x.gather(1, index), index.to(torch.int32)


def in_place_views(x):
    y = x.clone()
    y.t_()
    y.unsqueeze_(0)
    return y.mul_(2)


def gradients_of_parameters_only(x):
    weight, bias = (torch.ones(4, device="cuda", requires_grad=True) for _ in range(2))
    normalized = torch.nn.functional.layer_norm(x, [4], weight, bias)
    return torch.autograd.grad(normalized.square().sum(), (weight, bias))


OPERATIONS = {
    "several results": lambda x: torch.topk(x, 2, dim=1),
    "given memory": lambda x: torch.add(x, 1, out=torch.empty(0, device="cuda")),
    "its input": lambda x: x.clone().relu_(),
    "empty tensors": lambda x: torch.cat([x, x[:0]]) * x[:0].sum(),
    "lists": whole_lists,
    "Python numbers": python_numbers,
    "integers": integers,
    "other layouts": lambda x: (
        x.t().clone(memory_format=torch.preserve_format),
        x.expand(2, 4, 4).transpose(0, 2) + 1,
    ),
    "in-place views": in_place_views,
    "views of results": lambda x: (x * 2).chunk(2, dim=1),
    "reductions": lambda x: (x.sum(0), x.double().mean(), x.softmax(-1), x.logsumexp(1), x.cumsum(0), x.max(dim=1)),
    "normalizations": lambda x: (torch.nn.functional.layer_norm(x, [4]), torch.nn.functional.gelu(x)),
    "gradients": gradients_of_parameters_only,
    "low precision": lambda x: (x.to(torch.bfloat16) @ x.to(torch.bfloat16).t(), x.half().float()),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_replay_is_bit_identical_to_eager(operation):
    x = torch.randn(4, 4, device="cuda")
    graph, captured = capture(lambda: operation(x))
    for _ in range(2):
        x.normal_()
        graph.replay()
        eager = operation(x)
        pairs = [(captured, eager)] if isinstance(eager, torch.Tensor) else zip(captured, eager, strict=True)
        for got, expected in pairs:
            if isinstance(expected, torch.Tensor):
                assert got.stride() == expected.stride()
                assert torch.equal(got, expected)
            else:
                assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool]
)
def test_outputs_are_poisoned_until_the_first_replay(dtype):
    x = torch.ones(4, device="cuda", dtype=dtype)
    graph, y = capture(x.clone)
    assert torch.isnan(y).all() if dtype.is_floating_point or dtype.is_complex else not y.any()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # changes nothing
        graph.replay()
    assert torch.equal(y, x)


def test_accumulated_gradients_are_restored():
    weight = torch.ones(3, device="cuda", requires_grad=True)
    weight.grad = torch.full_like(weight, 5.0)
    saved = (weight * 2).exp()
    graph, _ = capture(lambda: (weight * 2).sum().backward())
    assert weight.grad.tolist() == [5, 5, 5]
    graph.replay()
    assert weight.grad.tolist() == [7, 7, 7]
    saved.sum().backward()  # replays do not bump version counters
