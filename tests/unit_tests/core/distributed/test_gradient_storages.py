"""When the optimizer's gradients have memory, and when that may be among the activations of graphs."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp.gradient_storages import GradientStorages

SIZES = {"first": [3, 200], "second": [5]}


@pytest.fixture
def grads():
    """Gradients by bucket, as the optimizer has them."""
    return {
        bucket: [SimpleNamespace(_local_tensor=torch.full((size,), float(size))) for size in sizes]
        for bucket, sizes in SIZES.items()
    }


@pytest.fixture
def storages(grads):
    return GradientStorages((bucket, grad) for bucket, of_bucket in grads.items() for grad in of_bucket)


def local_tensors(grads):
    return [grad._local_tensor for of_bucket in grads.values() for grad in of_bucket]


def sizes(grads):
    return [tensor.untyped_storage().nbytes() for tensor in local_tensors(grads)]


def test_gradients_of_a_bucket_share_a_storage_and_keep_their_values(grads, storages):
    for tensor in local_tensors(grads):
        assert tensor.tolist() == [float(tensor.numel())] * tensor.numel()
    first, second, third = (tensor.untyped_storage().data_ptr() for tensor in local_tensors(grads))
    assert first == second != third


def test_memory_is_given_back_and_allocated_again_for_the_same_tensors(grads, storages):
    before, full = local_tensors(grads), sizes(grads)
    storages.free()
    assert sizes(grads) == [0, 0, 0]
    storages.allocate()
    assert sizes(grads) == full
    assert all(one is other for one, other in zip(before, local_tensors(grads), strict=True))
    local_tensors(grads)[1].fill_(7.0)
    storages.allocate()  # it is there already
    assert local_tensors(grads)[1].tolist() == [7.0] * 200


def test_settled_memory_stays_until_it_leaves(grads, storages):
    full = sizes(grads)
    storages.free()
    storages.leave_room()
    assert sizes(grads) == [0, 0, 0]
    storages.settle()
    addresses = [tensor.data_ptr() for tensor in local_tensors(grads)]
    storages.allocate()
    storages.free()
    assert sizes(grads) == full
    assert [tensor.data_ptr() for tensor in local_tensors(grads)] == addresses
    storages.leave()
    assert sizes(grads) == [0, 0, 0]


def test_a_second_capture_settles_anew(grads, storages):
    storages.free()
    for _ in range(2):
        storages.leave_room()
        assert sizes(grads) == [0, 0, 0]
        storages.settle()
        assert 0 not in sizes(grads)


def test_gradients_in_use_are_never_lost(grads, storages):
    for change in (storages.leave_room, storages.settle, storages.leave):
        change()
        assert [tensor.tolist() for tensor in local_tensors(grads)] == [[3.0] * 3, [200.0] * 200, [5.0] * 5]
    storages.free()
    assert sizes(grads) == [0, 0, 0]
    storages.settle()
    storages.allocate()
    local_tensors(grads)[0].fill_(1.0)
    storages.leave()  # graphs are deleted between backward and the optimizer's step
    assert local_tensors(grads)[0].tolist() == [1.0] * 3
    storages.free()
    assert sizes(grads) == [0, 0, 0]
