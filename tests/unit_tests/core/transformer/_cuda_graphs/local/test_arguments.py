"""arguments: arguments of graphs, their descriptions, and walks through them."""

import dataclasses
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.transformer._cuda_graphs.local.arguments import (
    described,
    leaves_of,
    metas_of,
    tensors_of,
    with_tensors,
)
from megatron.core.transformer.cuda_graphs import (
    ArgMetadata,
    CudagraphBufferMetadata,
    _check_supported_type,
    tree_map,
)


@dataclasses.dataclass(frozen=True)
class Packed:
    lengths: torch.Tensor
    count: int
    derived: Any = None

    def __post_init__(self):
        object.__setattr__(self, "derived", self.count * 2)


class Color(Enum):
    RED = 1


class TestArgMetadata:
    def test_describes_a_tensor(self):
        tensor = torch.empty(2, 3, dtype=torch.bfloat16, requires_grad=True)
        meta = ArgMetadata(tensor)
        assert (meta.type, meta.shape, meta.dtype, meta.device) == (torch.Tensor, (2, 3), torch.bfloat16, tensor.device)
        assert meta.requires_grad
        assert meta.value == tensor.data_ptr()

    def test_keeps_no_tensor(self):
        assert not [value for value in vars(ArgMetadata(torch.empty(2))).values() if isinstance(value, torch.Tensor)]

    def test_keeps_any_other_argument(self):
        assert ArgMetadata("text").value == "text"
        assert ArgMetadata(None).type is type(None)

    def test_shares_what_is_known_of_the_tensor(self):
        tensor: Any = torch.empty(2)
        tensor.cg_buffer_metadata = CudagraphBufferMetadata()
        assert ArgMetadata(tensor).cg_buffer_metadata is tensor.cg_buffer_metadata

    @pytest.mark.parametrize("tensor", [torch.ones(2, 3).t(), torch.ones(2, 3, requires_grad=True)])
    def test_zeros_are_like_the_tensor(self, tensor):
        zeros = ArgMetadata(tensor).zeros_like()
        assert not zeros.any()
        assert (zeros.shape, zeros.stride(), zeros.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert zeros.requires_grad == tensor.requires_grad
        assert zeros.is_leaf

    def test_zeros_of_a_tensor_that_overlaps_itself_do_not_overlap(self):
        zeros = ArgMetadata(torch.ones(3, 1).expand(3, 4)).zeros_like()
        zeros[0, 0] = 1
        assert zeros.sum() == 1

    def test_only_tensors_have_zeros(self):
        with pytest.raises(TypeError, match="cannot make zeros like an argument of type int"):
            ArgMetadata(3).zeros_like()


def test_buffer_metadata_begins_with_nothing_known():
    known = CudagraphBufferMetadata()
    assert not (known.is_cudagraph_input or known.is_cudagraph_output)
    assert (known.input_use_count, known.cudagraph_reuse_ref_count, known.capture_reuse_count) == (0, 0, 0)
    assert known.fwd_cudagraph_buffer is known.bwd_cudagraph_buffer is None


class TestTreeMap:
    def test_maps_nested_tuples_lists_dicts_and_dataclasses(self):
        tree = (1, [2, {"a": Packed(torch.zeros(1), 3)}], None)
        mapped = tree_map(lambda leaf: "t" if isinstance(leaf, torch.Tensor) else leaf, tree)
        assert mapped[:1] == (1,)
        assert mapped[1][1]["a"].lengths == "t"

    def test_does_not_run_post_init(self):
        mapped = tree_map(lambda leaf: leaf + 1 if isinstance(leaf, int) else leaf, Packed(torch.zeros(1), 3))
        assert (mapped.count, mapped.derived) == (4, 7)

    def test_leaves_the_original_alone(self):
        packed = Packed(torch.zeros(1), 3)
        tree_map(lambda leaf: None, packed)
        assert packed.count == 3

    def test_leaves_come_in_the_order_of_the_arguments(self):
        assert leaves_of(({"b": 1, "a": 2}, [3, (4,)])) == [1, 2, 3, 4]


class TestTensors:
    def test_are_found_in_all_arguments_in_order(self):
        one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
        assert tensors_of((one, 5), {"packed": Packed(two, 1), "rest": [three, None]}) == (one, two, three)

    def test_one_tensor_alone_is_found(self):
        tensor = torch.ones(1)
        assert tensors_of(tensor) == (tensor,)
        assert tensors_of(None) == ()

    def test_descriptions_take_their_place_and_give_it_back(self):
        tree = (torch.ones(1), {"packed": Packed(torch.ones(2), 1)}, "text")
        metas = described(tree)
        assert [tuple(meta.shape) for meta in metas_of(metas)] == [(1,), (2,)]
        assert metas[2] == "text"
        put = with_tensors(metas, iter([torch.zeros(1), torch.zeros(2)]))
        assert tensors_of(put)[1].tolist() == [0, 0]
        assert put[1]["packed"].count == 1


class TestSupportedTypes:
    @pytest.mark.parametrize(
        "argument",
        [
            torch.ones(1),
            torch.nn.Parameter(torch.ones(1)),
            None,
            True,
            1,
            1.5,
            "text",
            Color.RED,
            torch.float32,
            Packed(torch.ones(1), 1),
            (torch.ones(1), None),
            {"a": [1]},
            StaticInferenceContext(1, 2),
            dist.ProcessGroup.__new__(dist.ProcessGroup),
        ],
        ids=lambda argument: type(argument).__name__,
    )
    def test_are_taken(self, argument):
        _check_supported_type(ArgMetadata(argument))

    @pytest.mark.parametrize("argument", [object(), SimpleNamespace(), {1, 2}, [object()], Packed(object(), 1)])
    def test_others_are_refused_by_name(self, argument):
        with pytest.raises(TypeError, match=r"an argument of type (object|SimpleNamespace|set) cannot be given"):
            _check_supported_type(ArgMetadata(argument))
