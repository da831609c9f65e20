"""addresses: a tensor that is no longer where it was at capture is named."""

import re

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.addresses import (
    AddressGuard,
    MovedBufferError,
    address_of,
)


class _Model:
    """A weight and its main gradient, either of which may be replaced."""

    def __init__(self):
        self.weight: torch.Tensor = torch.zeros(3)
        self.main_grad: torch.Tensor | None = torch.zeros(3)

    def guard(self):
        return AddressGuard(
            lambda: [self.weight, self.main_grad], ["weight", "main_grad"].__getitem__, "Capture the graphs again."
        )


def test_tensors_that_stay_are_accepted():
    model = _Model()
    guard = model.guard()
    model.weight.add_(1)
    guard.check()


def test_a_tensor_that_moved_is_named_with_both_addresses_and_the_advice():
    model = _Model()
    guard, before = model.guard(), model.main_grad
    model.main_grad = torch.zeros(3)
    message = f"use main_grad at {address_of(before):#x}.*now it is at {address_of(model.main_grad):#x}. Capture the"
    with pytest.raises(MovedBufferError, match=message):
        guard.check()


def test_a_tensor_whose_data_was_replaced_has_moved():
    model = _Model()
    guard, before = model.guard(), model.weight.detach()
    model.weight.data = before.clone()
    with pytest.raises(MovedBufferError, match="use weight at"):
        guard.check()


def test_a_tensor_that_is_gone_has_moved():
    model = _Model()
    guard = model.guard()
    model.main_grad = None
    with pytest.raises(MovedBufferError, match=r"main_grad .* it does not exist any more"):
        guard.check()


def test_a_tensor_that_did_not_exist_at_capture_is_refused():
    model = _Model()
    model.main_grad = None
    guard = model.guard()
    model.main_grad = torch.zeros(3)
    with pytest.raises(MovedBufferError, match=r"captured without main_grad, which is now at"):
        guard.check()


def test_a_guard_that_refused_accepts_a_tensor_that_is_back():
    model = _Model()
    guard, before = model.guard(), model.weight
    model.weight = torch.zeros(3)
    with pytest.raises(MovedBufferError):
        guard.check()
    model.weight = before
    guard.check()


def test_another_number_of_tensors_than_at_capture_is_refused():
    tensors = [torch.zeros(3)]
    guard = AddressGuard(lambda: tensors, str, "Capture the graphs again.")
    tensors.append(torch.zeros(3))
    with pytest.raises(MovedBufferError, match=re.escape("1 tensors at capture and 2 now. Capture the graphs again.")):
        guard.check()


@pytest.mark.parametrize("tensor", [None, torch.zeros(3, device="meta"), torch.zeros(3).to_sparse()])
def test_what_has_no_memory_of_its_own_has_no_address(tensor):
    assert address_of(tensor) == 0
