"""Test the arguments of local graphs: supported types, traversal, and differences from capture."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.transformer._cuda_graphs.local.arguments import described, mismatches
from megatron.core.transformer.cuda_graphs import ArgMetadata, _check_supported_type, tree_map


@dataclasses.dataclass(frozen=True)
class Packed:
    lengths: torch.Tensor
    count: int
    derived: Any = None

    def __post_init__(self):
        object.__setattr__(self, "derived", self.count * 2)


class TestArgMetadata:
    @pytest.mark.parametrize("tensor", [torch.ones(2, 3).t(), torch.ones(2, 3, requires_grad=True)])
    def test_zeros_are_like_the_tensor(self, tensor):
        zeros = ArgMetadata(tensor).zeros_like()
        assert not zeros.any()
        assert (zeros.shape, zeros.stride(), zeros.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert zeros.requires_grad == tensor.requires_grad
        assert zeros.is_leaf

    def test_zeros_like_expanded_tensor_are_dense(self):
        zeros = ArgMetadata(torch.ones(3, 1).expand(3, 4)).zeros_like()
        zeros[0, 0] = 1
        assert zeros.sum() == 1


class TestTreeMap:
    def test_tree_map_maps_containers_and_dataclasses(self):
        tree = (1, [2, {"a": Packed(torch.zeros(1), 3)}], None)
        mapped = tree_map(lambda leaf: "t" if isinstance(leaf, torch.Tensor) else leaf, tree)
        assert mapped[:1] == (1,)
        assert mapped[1][1]["a"].lengths == "t"

    def test_post_init_does_not_run(self):
        mapped = tree_map(lambda leaf: leaf + 1 if isinstance(leaf, int) else leaf, Packed(torch.zeros(1), 3))
        assert (mapped.count, mapped.derived) == (4, 7)


class TestSupportedTypes:
    @pytest.mark.parametrize("argument", [object(), SimpleNamespace(), {1, 2}, [object()], Packed(object(), 1)])
    def test_other_types_are_refused_by_name(self, argument):
        with pytest.raises(TypeError, match=r"does not support arguments of type (object|SimpleNamespace|set)"):
            _check_supported_type(ArgMetadata(argument))


def compare(given, captured, grad_enabled=False):
    return mismatches((given,), {}, ((described(captured),), {}), grad_enabled)


@pytest.mark.parametrize(
    ("given", "captured", "line"),
    [
        (torch.ones(3), torch.ones(2), "args[0]: shape (3,), captured with (2,)"),
        (torch.ones(2).int(), torch.ones(2), "args[0]: torch.int32, captured with torch.float32"),
        (torch.ones(2, device="meta"), torch.ones(2), "args[0]: device meta, captured with cpu"),
        (None, torch.ones(2), "args[0]: NoneType, captured with a tensor"),
        (torch.ones(2), None, "args[0]: Tensor, captured with NoneType"),
        (1, True, "args[0]: int, captured with bool"),
        (SimpleNamespace(), 1, "args[0]: SimpleNamespace, captured with int"),
        ("a", "b", "args[0]: 'a', captured with 'b'"),
        ((1,), (1, 2), "args[0][1] is missing: it was given at capture"),
        ((1, 3), (1, 2), "args[0][1]: 3, captured with 2"),
        ({"a": 1, "b": 2}, {"a": 1}, "args[0]['b'] was not given at capture"),
        ({"a": 1}, {"a": 2}, "args[0]['a']: 1, captured with 2"),
        (Packed(torch.ones(3), 1), Packed(torch.ones(2), 1), "args[0]['lengths']: shape (3,), captured with (2,)"),
        (Packed(None, 1), Packed(torch.ones(2), 1), "args[0]['lengths']: NoneType, captured with a tensor"),
    ],
)
def test_each_difference_is_one_line(given, captured, line):
    assert compare(given, captured) == [line]


def test_all_differences_are_named():
    captured = described({"a": 1, "b": torch.ones(2), "c": 2})
    assert mismatches((), {"a": 2, "b": torch.ones(3), "d": 1}, ((1,), captured), False) == [
        "args[0] is missing: it was given at capture",
        "kwargs['a']: 2, captured with 1",
        "kwargs['b']: shape (3,), captured with (2,)",
        "kwargs['c'] is missing: it was given at capture",
        "kwargs['d'] was not given at capture",
    ]


def test_missing_gradient_matters_only_in_grad_mode():
    given, captured = torch.ones(2, requires_grad=True), torch.ones(2)
    assert compare(given, captured) == []
    (line,) = compare(given, captured, grad_enabled=True)
    assert "requires grad, but did not at capture" in line
    assert compare(captured, given, grad_enabled=True) == []


def test_other_inference_context_is_a_difference():
    context = StaticInferenceContext(1, 2)
    assert compare(context, context) == []
    (line,) = compare(StaticInferenceContext(1, 2), context)
    assert "a different StaticInferenceContext than at capture" in line
