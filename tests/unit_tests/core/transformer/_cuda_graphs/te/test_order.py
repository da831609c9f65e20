"""order: from pipeline schedules to orders of passes."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer._cuda_graphs.engine.plan import ordered_plan
from megatron.core.transformer._cuda_graphs.te import order
from megatron.core.transformer._cuda_graphs.te.order import (
    convert_schedule_table_to_order,
    get_overlap_moe_expert_parallel_comm_order,
)
from tests.support.replaced import replaced


def test_the_worked_examples_of_the_docstrings_hold():
    runner = doctest.DocTestRunner()
    for function in (convert_schedule_table_to_order, get_overlap_moe_expert_parallel_comm_order):
        for example in doctest.DocTestFinder(recurse=False).find(function, globs=vars(order)):
            runner.run(example)
    assert runner.summarize().attempted >= 3
    assert runner.summarize().failed == 0


@st.composite
def schedules(draw):
    """Arguments of ``convert_schedule_table_to_order`` as the schedules of megatron-core make them."""
    microbatches, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    table = get_schedule_table(microbatches, chunks, draw(st.integers(1, microbatches)))
    return draw(st.integers(0, len(table))), chunks, table


@given(schedules())
def test_an_order_starts_with_the_warm_up_and_then_alternates(case):
    warmup, chunks, table = case
    order = convert_schedule_table_to_order(*case)
    signs = [step > 0 for step in order]
    alternating = [True, False] * (len(table) - warmup)
    assert signs == [True] * warmup + alternating + [False] * warmup
    assert [step - 1 for step in order if step > 0] == [chunk for _, chunk in table]
    assert [step + chunks for step in order if step < 0] == [chunk for _, chunk in table]


@given(schedules())
def test_orders_are_those_of_megatron_core(case):
    theirs = replaced("megatron.core.transformer.cuda_graphs")
    order = convert_schedule_table_to_order(*case)
    assert order == theirs.convert_schedule_table_to_order(*case)


@st.composite
def chunk_orders(draw):
    """An order of chunks with the layers of each."""
    warmup, chunks, table = draw(schedules())
    order = convert_schedule_table_to_order(warmup, chunks, table)
    return order, draw(st.lists(st.integers(0, 4), min_size=chunks, max_size=chunks))


@given(chunk_orders(), st.booleans())
def test_orders_of_layers_are_those_of_megatron_core(case, with_weight_gradients):
    theirs = replaced("megatron.core.transformer.cuda_graphs")
    order, layers = case
    ours = get_overlap_moe_expert_parallel_comm_order(order, layers, with_weight_gradients)
    assert ours == theirs.get_overlap_moe_expert_parallel_comm_order(order, layers, with_weight_gradients)


@given(chunk_orders(), st.booleans())
def test_an_order_of_layers_runs_every_layer_as_often_as_its_chunk(case, with_weight_gradients):
    order, layers = case
    steps, ids = get_overlap_moe_expert_parallel_comm_order(order, layers, with_weight_gradients)
    assert len(steps) == len(ids)
    flat = [(chunk, layer) for chunk, count in enumerate(layers) for layer in range(count)]
    for number, (chunk, _) in enumerate(flat, start=1):
        passes = order.count(chunk + 1)
        assert steps.count(number) == steps.count(-number) == passes
        assert steps.count(-number - 0.5) == passes * with_weight_gradients
    assert [flat[int(step) - 1] for step in steps if step > 0] == [tuple(pair) for pair in ids if pair is not None]
    assert all((step > 0) == (pair is not None) for step, pair in zip(steps, ids, strict=True))


def test_weight_gradients_of_the_last_layer_wait_for_the_forward_pass_beside_them():
    steps, _ = get_overlap_moe_expert_parallel_comm_order([1, -1, 2, -2], [1, 3], True)
    assert steps == [1, 2, -1, 3, 4, -1.5, -4, -4.5, -3, -3.5, -2, -2.5]


def test_layers_that_are_not_captured_take_their_turns_too():
    """The first of three layers: the last one's backward pass comes before the second one's forward pass beside it."""
    order = get_overlap_moe_expert_parallel_comm_order([1, -1, 1, -1], [2], False, [[None, 0, 1]])
    assert order == ([1, 2, -2, 1, -1, 2, -2, -1], [[0, 0], [0, 1], None, [0, 0], None, [0, 1], None, None])


def test_a_plan_follows_an_order_of_layers():
    order, _ = get_overlap_moe_expert_parallel_comm_order([1, 2, -2, 1, -1, 2, -2, -1], [1, 2], True)
    assert len(ordered_plan(order, 1, 3).steps) == len(order)


@pytest.mark.parametrize("order", [[1, -1, -1, 1], [1, 1, -1, 1, 1, -1, -1, -1], [1, -1, 1, 1, -1, -1]], ids=str)
def test_passes_that_do_not_alternate_are_refused(order):
    with pytest.raises(ValueError, match="order must alternate backward and forward passes"):
        get_overlap_moe_expert_parallel_comm_order(order, [1], False)
