"""Test that ranks agree on a new shape before a recapture."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.transformer._cuda_graphs.eager_passes import EagerPasses
from megatron.core.transformer._cuda_graphs.te.changed_shapes import STEPS, ChangedShapes

pytestmark = pytest.mark.usefixtures("cpu_backend")
CAPTURED, SHORT, LONG = None, (8, 2), (16, 2)
LAYERS = 3


def steps_of(shapes, groups=(), microbatches=1, recaptures=True):
    """Run a step of each shape in ``shapes`` (None: the captured shape).

    After each step, yield the new shape that all ranks agree on, or None.
    """
    passes = EagerPasses()
    watch = ChangedShapes(passes, 4, LAYERS, groups, microbatches, recaptures)
    for shape in shapes:
        for _ in range(LAYERS * microbatches if shape else 0):
            passes.note("another shape", shape)
        yield watch.before_step(microbatches)


def agreed(shapes, **options):
    """Return ``(step, shape)`` for each step, counted from 1, after which ranks agree on a new shape."""
    return [(step, shape) for step, shape in enumerate(steps_of(shapes, **options), 1) if shape]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_ranks_agree_a_step_after_the_comparison(microbatches):
    assert agreed([LONG] * (STEPS + 1), microbatches=microbatches) == [(STEPS + 1, LONG)]


def test_all_steps_between_comparisons_need_the_shape():
    assert agreed([CAPTURED] * 3 + [LONG] * 3 * STEPS)[0] == (2 * STEPS + 1, LONG)


@pytest.mark.parametrize(
    "shapes",
    [
        [CAPTURED] * 4 * STEPS,
        [SHORT, LONG] * 2 * STEPS,
        [CAPTURED, LONG] * 2 * STEPS,
        ([LONG] * (STEPS - 1) + [SHORT]) * 4,
        ([LONG] * (STEPS - 1) + [CAPTURED]) * 4,
    ],
    ids=["as captured", "two others", "captured and another", "another at times", "as captured at times"],
)
def test_alternating_shapes_are_not_agreed_on(shapes):
    assert agreed(shapes) == []


def test_partly_replayed_steps_do_not_count():
    passes = EagerPasses()
    watch = ChangedShapes(passes, 4, LAYERS, (), 2, recaptures=True)
    for _ in range(2 * STEPS):
        for _ in range(LAYERS):  # in only one of two micro-batches
            passes.note("another shape", LONG)
        assert watch.before_step(2) is None


class Group:
    """A group of two ranks. The other rank always has the shape ``other``."""

    def __init__(self, other):
        self.other = torch.tensor([*other, *(-size for size in other)])

    def size(self):
        return 2


@pytest.fixture
def two_ranks(monkeypatch):
    """Patch ``all_reduce`` to reduce over the ranks of a ``Group``."""

    def all_reduce(tensor, op, group):
        assert op == torch.distributed.ReduceOp.MAX
        tensor.copy_(torch.maximum(tensor, group.other))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)


@pytest.mark.parametrize(
    ("others", "expected"),
    [([LONG], LONG), ([SHORT], None), ([(0, 0)], None), ([(16, 4)], None), ([LONG, LONG], LONG), ([LONG, SHORT], None)],
)
@pytest.mark.usefixtures("two_ranks")
def test_all_ranks_must_have_the_same_shape(others, expected):
    groups = [Group(other) for other in others]
    assert agreed([LONG] * (STEPS + 1), groups=groups) == ([(STEPS + 1, expected)] if expected else [])


def test_one_rank_does_not_communicate(monkeypatch):
    monkeypatch.delattr(torch.distributed, "all_reduce")
    assert agreed([LONG] * (STEPS + 1), groups=[SimpleNamespace(size=lambda: 1)])


def test_no_agreement_without_recaptures_left():
    assert agreed([LONG] * 3 * STEPS, recaptures=False) == []
