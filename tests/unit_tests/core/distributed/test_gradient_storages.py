"""Test when the memory of the optimizer's gradients is allocated, freed, and taken from a graph's pool."""

import pytest
import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp.optimizer_gradients import GradientStorages

SIZES = {"first": [3, 200], "second": [5]}


class Gradient:
    """An optimizer gradient that pytest can print without reading freed memory."""

    def __init__(self, size):
        self._local_tensor = torch.full((size,), float(size))

    def __repr__(self):
        return f"<a gradient of {self._local_tensor.numel()} elements>"


@pytest.fixture
def grads():
    """Return gradients by bucket."""
    return {bucket: [Gradient(size) for size in sizes] for bucket, sizes in SIZES.items()}


@pytest.fixture
def storages(grads):
    return GradientStorages((bucket, grad) for bucket, of_bucket in grads.items() for grad in of_bucket)


def local_tensors(grads):
    return [grad._local_tensor for of_bucket in grads.values() for grad in of_bucket]


def sizes(grads):
    return [tensor.untyped_storage().nbytes() for tensor in local_tensors(grads)]


def values(grads):
    """Return the elements of each gradient, or None if its memory is freed."""
    return [tensor.tolist() if tensor.untyped_storage().nbytes() else None for tensor in local_tensors(grads)]


def addresses(grads):
    return [tensor.data_ptr() for tensor in local_tensors(grads)]


def fill(grads, index, value):
    assert sizes(grads)[index]
    local_tensors(grads)[index].fill_(value)


def test_adopted_memory_stays_until_it_is_detached(grads, storages):
    full = sizes(grads)
    storages.free()
    storages.reserve()
    assert sizes(grads) == [0, 0, 0]
    storages.adopt()
    adopted = addresses(grads)
    storages.allocate()
    storages.free()
    assert sizes(grads) == full
    assert addresses(grads) == adopted
    storages.detach()
    assert sizes(grads) == [0, 0, 0]


@pytest.mark.parametrize("leave", [GradientStorages.detach, GradientStorages.preserve])
def test_gradients_in_use_are_never_lost(grads, storages, leave):
    for change in (storages.reserve, storages.adopt, storages.detach, storages.preserve):
        change()
        assert values(grads) == [[3.0] * 3, [200.0] * 200, [5.0] * 5]
    storages.free()
    assert sizes(grads) == [0, 0, 0]
    storages.adopt()
    storages.allocate()
    fill(grads, 0, 1.0)
    leave(storages)  # graphs are deleted or replayed between backward and the optimizer's step
    assert values(grads)[0] == [1.0] * 3
    storages.free()
    assert sizes(grads) == [0, 0, 0]
