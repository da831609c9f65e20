"""Clipping takes the same local tensors as megatron-core's own."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard


@pytest.fixture
def clip_grads():
    from megatron.core.optimizer import clip_grads

    return clip_grads


def test_the_local_tensor_of_a_dtensor(mesh, clip_grads):
    from megatron.core.utils import to_local_if_dtensor as megatron_cores

    tensor = DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
    assert clip_grads.to_local_if_dtensor(tensor) is megatron_cores(tensor)


def test_any_other_tensor_is_left_as_it_is(clip_grads):
    tensor = torch.ones(3)
    assert clip_grads.to_local_if_dtensor(tensor) is tensor
