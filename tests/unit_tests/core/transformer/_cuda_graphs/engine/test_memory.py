"""graph_memory: a weak reference is a tensor of the same memory that does not hold it."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.transformer._cuda_graphs.engine.memory import weak_reference


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0),
        torch.arange(12.0).view(3, 4)[1:, ::2],
        torch.arange(12.0, dtype=torch.bfloat16).view(3, 4).t(),
        torch.tensor(3),
        torch.zeros(0, 3),
        torch.arange(12.0).view(3, 2, 2).view(torch.complex64).conj(),
        torch._neg_view(torch.arange(3.0)),
    ],
    ids=["whole", "part", "transposed bf16", "a number", "empty", "conjugate", "negative"],
)
def test_it_has_the_same_memory_shape_strides_and_dtype(tensor):
    weak = weak_reference(tensor)
    assert weak.data_ptr() == tensor.data_ptr()
    assert (weak.shape, weak.stride(), weak.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(weak, tensor)


def test_what_is_written_to_it_is_written_to_the_tensor():
    tensor = torch.zeros(4)
    weak_reference(tensor[2:]).fill_(7)
    assert tensor.tolist() == [0, 0, 7, 7]


def test_it_does_not_hold_the_memory():
    tensor = torch.zeros(4)
    storage = StorageWeakRef(tensor.untyped_storage())
    weak = weak_reference(tensor)
    del tensor
    gc.collect()
    assert storage.expired()
    assert weak.shape == (4,)


def test_it_takes_no_part_in_autograd():
    assert not weak_reference(torch.ones(2, requires_grad=True) * 2).requires_grad
