"""changed_shapes: when ranks agree that training has another shape than at capture."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.transformer._cuda_graphs.eager_passes import EagerPasses
from megatron.core.transformer._cuda_graphs.te.changed_shapes import STEPS, ChangedShapes

pytestmark = pytest.mark.usefixtures("cpu_backend")
CAPTURED, SHORT, LONG = None, (8, 2), (16, 2)
LAYERS = 3


def steps_of(shapes, groups=(), microbatches=1):
    """What is agreed on before each step but the first, if the steps have these shapes; None is the captured one."""
    passes = EagerPasses()
    watch = ChangedShapes(passes, 4, LAYERS, groups, microbatches)
    for shape in shapes:
        for _ in range(LAYERS * microbatches if shape else 0):
            passes.note(*shape)
        yield watch.before_step(microbatches)


def agreed(shapes, **options):
    """The steps, counted from 1, after which there was an agreement, and what on."""
    return [(step, shape) for step, shape in enumerate(steps_of(shapes, **options), 1) if shape]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_shape_of_all_steps_is_agreed_on_a_step_later(microbatches):
    assert agreed([LONG] * (STEPS + 1), microbatches=microbatches) == [(STEPS + 1, LONG)]


def test_a_change_is_noticed_once_all_steps_between_two_comparisons_have_it():
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
def test_shapes_that_take_turns_are_not_agreed_on(shapes):
    assert agreed(shapes) == []


def test_a_step_of_which_some_micro_batches_were_replayed_does_not_count():
    passes = EagerPasses()
    watch = ChangedShapes(passes, 4, LAYERS, (), 2)
    for _ in range(2 * STEPS):
        for _ in range(LAYERS):  # of one of two micro-batches
            passes.note(*LONG)
        assert watch.before_step(2) is None


class Group:
    """A group of two ranks, the other of which always brings the same."""

    def __init__(self, other):
        self.other = torch.tensor([other, [-size for size in other]])

    def size(self):
        return 2


@pytest.mark.parametrize(
    ("others", "expected"),
    [([LONG], LONG), ([SHORT], None), ([(0, 0)], None), ([(16, 4)], None), ([LONG, LONG], LONG), ([LONG, SHORT], None)],
)
def test_all_ranks_of_all_groups_must_bring_the_same_shape(monkeypatch, others, expected):
    def all_reduce(tensor, op, group):
        assert op == torch.distributed.ReduceOp.MAX
        tensor.copy_(torch.maximum(tensor, group.other))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    groups = [Group(other) for other in others]
    assert agreed([LONG] * (STEPS + 1), groups=groups) == ([(STEPS + 1, expected)] if expected else [])


def test_a_group_of_one_rank_is_not_asked(monkeypatch):
    monkeypatch.delattr(torch.distributed, "all_reduce")
    assert agreed([LONG] * (STEPS + 1), groups=[SimpleNamespace(size=lambda: 1)])


def test_graphs_that_are_kept_for_their_shape_are_never_captured_again():
    passes = EagerPasses()
    watch = ChangedShapes(passes, 4, LAYERS, None, 1)
    for _ in range(3 * STEPS):
        for _ in range(LAYERS):
            passes.note(*LONG)
        assert watch.before_step(1) is None
