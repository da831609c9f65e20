"""mismatches: each difference between a call and the captured one is a line that says where and what."""

import dataclasses

import pytest
import torch

from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.transformer._cuda_graphs.local.arguments import described, mismatches


@dataclasses.dataclass
class Packed:
    lengths: torch.Tensor | None
    count: int


def compare(given, captured, grad_enabled=False):
    return mismatches((given,), {}, ((described(captured),), {}), grad_enabled)


SAME = [
    torch.ones(2),
    None,
    True,
    3,
    "text",
    (torch.ones(2), 1),
    [None, "a"],
    {"a": torch.ones(1)},
    Packed(torch.ones(2), 1),
]


@pytest.mark.parametrize("argument", SAME, ids=str)
def test_equal_arguments_have_none(argument):
    assert compare(argument, argument) == []


@pytest.mark.parametrize(
    ("given", "captured", "line"),
    [
        (torch.ones(3), torch.ones(2), "args[0]: shape (3,), captured with (2,)"),
        (torch.ones(2).int(), torch.ones(2), "args[0]: torch.int32, captured with torch.float32"),
        (torch.ones(2, device="meta"), torch.ones(2), "args[0]: device meta, captured with cpu"),
        (None, torch.ones(2), "args[0]: NoneType, captured with a tensor"),
        (torch.ones(2), None, "args[0]: Tensor, captured with NoneType"),
        (1, True, "args[0]: int, captured with bool"),
        ("a", "b", "args[0]: 'a', captured with 'b'"),
        ((1,), (1, 2), "args[0][1] is missing: it was given at capture"),
        ((1, 3), (1, 2), "args[0][1]: 3, captured with 2"),
        ({"a": 1, "b": 2}, {"a": 1}, "args[0]['b'] was not given at capture"),
        ({"a": 1}, {"a": 2}, "args[0]['a']: 1, captured with 2"),
        (Packed(torch.ones(2), 1), Packed(torch.ones(2), 2), "args[0]['count']: 1, captured with 2"),
        (Packed(torch.ones(3), 1), Packed(torch.ones(2), 1), "args[0]['lengths']: shape (3,), captured with (2,)"),
        (Packed(None, 1), Packed(torch.ones(2), 1), "args[0]['lengths']: NoneType, captured with a tensor"),
    ],
)
def test_each_is_one_line(given, captured, line):
    assert compare(given, captured) == [line]


def test_all_are_named_at_once():
    captured = described({"a": 1, "b": torch.ones(2), "c": 2})
    assert mismatches((), {"a": 2, "b": torch.ones(3), "d": 1}, ((1,), captured), False) == [
        "args[0] is missing: it was given at capture",
        "kwargs['a']: 2, captured with 1",
        "kwargs['b']: shape (3,), captured with (2,)",
        "kwargs['c'] is missing: it was given at capture",
        "kwargs['d'] was not given at capture",
    ]


def test_a_gradient_that_was_not_captured_matters_only_where_gradients_are_wanted():
    given, captured = torch.ones(2, requires_grad=True), torch.ones(2)
    assert compare(given, captured) == []
    (line,) = compare(given, captured, grad_enabled=True)
    assert "requires grad, captured without" in line
    assert compare(captured, given, grad_enabled=True) == []


def test_an_inference_context_must_be_the_captured_one():
    context = StaticInferenceContext(1, 2)
    assert compare(context, context) == []
    (line,) = compare(StaticInferenceContext(1, 2), context)
    assert "another StaticInferenceContext than at capture" in line


def test_a_type_that_no_graph_takes_is_refused():
    with pytest.raises(TypeError, match="an argument of type object"):
        compare(object(), 1)
