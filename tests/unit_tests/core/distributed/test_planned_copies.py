"""Copies that are planned once move what single copies move, neighbours together."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch


@pytest.fixture
def planned_copies():
    from megatron.core.distributed.fsdp.src.megatron_fsdp import planned_copies

    return planned_copies


def parts(tensor, *bounds):
    return [tensor[start:end] for start, end in bounds]


def count(copies):
    """How many tensors are copied, neighbours counted as one."""
    return sum(len(tos) for tos, _ in copies._calls.values())


def test_neighbours_are_copied_as_one(planned_copies):
    source, to = torch.arange(12.0), torch.zeros(12, dtype=torch.bfloat16)
    bounds = (0, 4), (4, 4), (4, 7), (7, 12)
    copies = planned_copies.PlannedCopies(zip(parts(to, *bounds), parts(source, *bounds), strict=True), ())
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
def test_what_lies_apart_is_copied_apart_and_gaps_are_left_alone(planned_copies, tos, sources):
    source, to = torch.arange(1.0, 9.0), torch.zeros(8)
    expected = to.clone()
    for (start, end), part in zip(tos, parts(source, *sources), strict=True):
        expected[start:end] = part
    copies = planned_copies.PlannedCopies(zip(parts(to, *tos), parts(source, *sources), strict=True), ())
    assert count(copies) == 2
    copies.run()
    assert torch.equal(to, expected)


def test_dtypes_are_kept_apart(planned_copies):
    source, single, half = torch.arange(8.0), torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)
    copies = planned_copies.PlannedCopies([(single, source[:4]), (half, source[4:])], ())
    with mock.patch.object(torch, "_foreach_copy_", wraps=torch._foreach_copy_) as launch:
        copies.run()
    assert launch.call_count == 2
    assert torch.equal(single, source[:4])
    assert torch.equal(half, source[4:].bfloat16())


def test_data_that_was_replaced_or_moved_is_noticed(planned_copies):
    buffers = [SimpleNamespace(data=torch.zeros(4)), SimpleNamespace(data=torch.zeros(4))]
    placement = planned_copies.Placement(buffers)
    assert placement.unchanged()
    kept = buffers[1].data
    buffers[1].data = kept.clone()
    assert not placement.unchanged()
    buffers[1].data = kept
    assert placement.unchanged()
    kept.data = torch.zeros(4)
    assert not placement.unchanged()
