"""Test the plan of steps for a pipeline order."""

import pytest
from hypothesis import given

from megatron.core.transformer._cuda_graphs.engine.plan import Pass, ordered_plan, unordered_plan

from ..pipeline_orders import orders


def passes(plan):
    """Return the plan as text: the first letter of each step's kind, and its slot."""
    return " ".join(f"{step.kind.value[0]}{step.slot}" for step in plan.steps)


def test_unordered_plan_runs_backwards_in_reverse():
    plan = unordered_plan(3)
    assert plan.callable_of_slot == (0, 1, 2)
    assert passes(plan) == "f0 f1 f2 b2 w2 b1 w1 b0 w0"
    assert passes(plan.forward_only()) == "f0 f1 f2"


def test_callables_divide_evenly_by_default():
    assert ordered_plan([1, 2, -2, -1], None, 6) == ordered_plan([1, 2, -2, -1], [3, 3], 6)


@given(orders())
def test_each_entry_runs_its_chunk_and_micro_batch(case):
    order, layers, _ = case
    plan = ordered_plan(order, layers, sum(layers))
    remaining = list(plan.steps)
    done = dict.fromkeys(order, 0)
    for chunk_step in order:
        chunk = int(abs(chunk_step)) - 1
        count = layers[chunk]
        ran, remaining = remaining[:count], remaining[count:]
        first = sum(layers[:chunk])
        expected = list(range(first, first + count))
        if chunk_step < 0:
            expected.reverse()
        assert [plan.callable_of_slot[step.slot] for step in ran] == expected
        kind = Pass.FORWARD if chunk_step > 0 else Pass.BACKWARD if chunk_step % 1 == 0 else Pass.WEIGHT_GRADIENTS
        assert all(step.kind is kind for step in ran)
        # The k-th forward, backward and weight gradients of a chunk belong to its k-th micro-batch.
        base = sum(layers[:chunk]) * order.count(chunk + 1)
        assert {(step.slot - base) // count for step in ran} <= {done[chunk_step]}
        done[chunk_step] += 1
    assert not remaining


@pytest.mark.parametrize(
    ("order", "layers", "count", "message"),
    [
        ([1, 1.5, -1], [1], 1, "_order contains 1.5: for chunk c"),
        ([1, -1.25, -1], [1], 1, "_order contains -1.25: for chunk c"),
        ([1, 0, -1], [1], 1, "_order contains 0: for chunk c"),
        ([1, -1, -0.5], [1], 1, "_order contains -0.5: for chunk c"),
        ([1, 1, -1, -1.5, -1], [1], 1, "2 forward, 2 backward and 1 weight-gradient passes of chunk 1"),
        ([1, -1.5, -1], [1], 1, "_order runs the weight gradients of chunk 1 before its backward"),
        ([], [1], 1, "0 forward, 0 backward and 0 weight-gradient passes of chunk 1"),
        ([-1], [1], 1, "0 forward, 1 backward and 0 weight-gradient passes of chunk 1"),
        ([1, -2, -1], [1], 1, "0 forward, 1 backward and 0 weight-gradient passes of chunk 2"),
        ([1, -2, 2, -1], [1, 1], 2, "_order runs the backward of chunk 2 before its forward"),
        ([1, 2, -2, -1], None, 3, r"_num_layers_per_chunk is \[1, 1\], but there are 2 chunks and 3 callables"),
        ([1, 2, -2, -1], [1], 2, r"_num_layers_per_chunk is \[1\], but there are 2 chunks and 2 callables"),
    ],
)
def test_invalid_order_is_refused(order, layers, count, message):
    with pytest.raises(ValueError, match=message):
        ordered_plan(order, layers, count)


def read_after(plan):
    """Map the slot of each backward pass to the slots whose input gradients are not needed afterwards."""
    return {step.slot: slots for step, slots in plan.gradients_read().items()}


def test_next_chunk_reads_gradients_of_the_chunk():
    plan = ordered_plan([1, 2, -2, -1], [2, 2], 4)
    assert passes(plan) == "f0 f1 f2 f3 b3 b2 b1 b0"
    assert read_after(plan) == {2: [3], 0: [1, 2]}


@given(orders())
def test_gradients_are_read_once_after_they_are_computed(case):
    order, layers, _ = case
    plan = ordered_plan(order, layers, sum(layers))
    place = {step.slot: i for i, step in enumerate(plan.steps) if step.kind is Pass.BACKWARD}
    read = [(slot, place[step.slot]) for step, slots in plan.gradients_read().items() for slot in slots]
    assert all(place[slot] < when for slot, when in read)
    last = sorted(place, key=place.__getitem__)[-1:]
    assert sorted(slot for slot, _ in read) == sorted(set(place) - set(last))
