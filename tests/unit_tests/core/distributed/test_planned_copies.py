"""Copies that are planned once move what single copies move, neighbours together."""

import pytest
import torch


@pytest.fixture
def optimizer_gradients():
    from megatron.core.distributed.fsdp.src.megatron_fsdp import optimizer_gradients

    return optimizer_gradients


def parts(tensor, *bounds):
    return [tensor[start:end] for start, end in bounds]


def count(copies):
    """How many tensors are copied, neighbours counted as one."""
    return sum(len(tos) for tos, _ in copies._calls.values())


def test_neighbours_are_copied_as_one(optimizer_gradients):
    source, to = torch.arange(12.0), torch.zeros(12, dtype=torch.bfloat16)
    bounds = (0, 4), (4, 4), (4, 7), (7, 12)
    copies = optimizer_gradients.PlannedCopies(zip(parts(to, *bounds), parts(source, *bounds), strict=True), ())
    assert count(copies) == 1
    copies.run()
    assert torch.equal(to, source.bfloat16())


@pytest.mark.parametrize(
    ("tos", "sources"),
    [
        ([(0, 4), (5, 8)], [(0, 4), (4, 7)]),  # a gap among the destinations
        ([(0, 4), (4, 7)], [(0, 4), (5, 8)]),  # among the sources
        ([(4, 7), (0, 4)], [(4, 7), (0, 4)]),  # another order
    ],
)
def test_what_lies_apart_is_copied_apart_and_gaps_are_left_alone(optimizer_gradients, tos, sources):
    source, to = torch.arange(1.0, 9.0), torch.zeros(8)
    expected = to.clone()
    for (start, end), part in zip(tos, parts(source, *sources), strict=True):
        expected[start:end] = part
    copies = optimizer_gradients.PlannedCopies(zip(parts(to, *tos), parts(source, *sources), strict=True), ())
    assert count(copies) == 2
    copies.run()
    assert torch.equal(to, expected)
