"""changed_shapes: when ranks agree that training has another shape than at capture."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.transformer._cuda_graphs.eager_passes import EagerPasses
from megatron.core.transformer._cuda_graphs.te import changed_shapes
from megatron.core.transformer._cuda_graphs.te.changed_shapes import STEPS, ChangedShapes

pytestmark = pytest.mark.usefixtures("cpu_backend")
CAPTURED, SHORT, LONG = None, (8, 2), (16, 2)
LAYERS = 3


def steps_of(shapes, groups=(), microbatches=1):
    """What is agreed on before each step but the first, if the steps have these shapes; None is the captured one."""
    passes = EagerPasses()
    watch = ChangedShapes(passes, 4, LAYERS, groups, microbatches, captures_again=True)
    for shape in shapes:
        for _ in range(LAYERS * microbatches if shape else 0):
            passes.note("another shape", shape)
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
    watch = ChangedShapes(passes, 4, LAYERS, (), 2, captures_again=True)
    for _ in range(2 * STEPS):
        for _ in range(LAYERS):  # of one of two micro-batches
            passes.note("another shape", LONG)
        assert watch.before_step(2) is None


class Group:
    """A group of two ranks, the other of which always brings the same shape, and is ``eager`` minus one if it says."""

    def __init__(self, other, eager=0):
        self.other = torch.tensor([*other, *(-size for size in other), eager])

    def size(self):
        return 2

    def rank(self):
        return 0


@pytest.fixture
def reasons(monkeypatch):
    """The store of the reasons why ranks run eagerly; this one is the first of several."""

    def all_reduce(tensor, op, group):
        assert op == torch.distributed.ReduceOp.MAX
        tensor.copy_(torch.maximum(tensor, group.other))

    store = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(changed_shapes, "_reasons", lambda: store)
    return store


@pytest.mark.parametrize(
    ("others", "expected"),
    [([LONG], LONG), ([SHORT], None), ([(0, 0)], None), ([(16, 4)], None), ([LONG, LONG], LONG), ([LONG, SHORT], None)],
)
@pytest.mark.usefixtures("reasons")
def test_all_ranks_of_all_groups_must_bring_the_same_shape(others, expected):
    groups = [Group(other) for other in others]
    assert agreed([LONG] * (STEPS + 1), groups=groups) == ([(STEPS + 1, expected)] if expected else [])


def test_a_group_of_one_rank_is_not_asked(monkeypatch):
    monkeypatch.delattr(torch.distributed, "all_reduce")
    assert agreed([LONG] * (STEPS + 1), groups=[SimpleNamespace(size=lambda: 1)])


def test_graphs_that_are_kept_for_their_shape_are_never_captured_again():
    passes = EagerPasses()
    watch = ChangedShapes(passes, 4, LAYERS, (), 1, captures_again=False)
    for _ in range(3 * STEPS):
        for _ in range(LAYERS):
            passes.note("another shape", LONG)
        assert watch.before_step(1) is None


def run_steps(eager, group):
    """Run steps, of which those whose number is in ``eager`` have an eager pass, beside a rank that ``group`` has."""
    passes = EagerPasses()
    watch = ChangedShapes(passes, 4, LAYERS, [group], 1, captures_again=False)
    for step in range(3 * STEPS):
        if step in eager:
            passes.note("a hook")
        watch.before_step(1)


def test_a_rank_that_waits_logs_once_why_another_runs_eagerly(reasons, caplog):
    reasons.set("4", "a mask")
    run_steps((), Group((0, 0), eager=4))
    (record,) = caplog.records
    assert record.message == "Other ranks wait for rank 3, which runs passes eagerly: a mask"


def test_a_rank_that_runs_eagerly_too_waits_for_no_other(reasons, caplog):
    run_steps(range(3 * STEPS), Group((0, 0), eager=4))
    assert not caplog.records
    assert reasons.get("1") == b"a hook"


@pytest.mark.parametrize(("eager", "repeats"), [((3,), False), ((3, 4), True), ((3, STEPS + 3), True)])
def test_a_rank_gives_its_reason_if_eager_passes_repeat(reasons, eager, repeats):
    run_steps(eager, Group((0, 0)))
    assert reasons.check(["1"]) == repeats
