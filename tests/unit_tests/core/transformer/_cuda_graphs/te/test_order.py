"""Test the order of passes in pipeline schedules."""

import doctest

from hypothesis import given
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer._cuda_graphs.te import order
from megatron.core.transformer._cuda_graphs.te.order import (
    convert_schedule_table_to_order,
    get_overlap_moe_expert_parallel_comm_order,
)
from tests.support.replaced import replaced


def test_docstring_examples_hold():
    runner = doctest.DocTestRunner()
    for function in (convert_schedule_table_to_order, get_overlap_moe_expert_parallel_comm_order):
        for example in doctest.DocTestFinder(recurse=False).find(function, globs=vars(order)):
            runner.run(example)
    assert runner.summarize().attempted >= 3
    assert runner.summarize().failed == 0


@st.composite
def schedules(draw):
    """Draw arguments of ``convert_schedule_table_to_order`` as megatron-core's schedules compute them."""
    microbatches, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    table = get_schedule_table(microbatches, chunks, draw(st.integers(1, microbatches)))
    return draw(st.integers(0, len(table))), chunks, table


@given(schedules())
def test_order_equals_megatron_core(case):
    theirs = replaced("megatron.core.transformer.cuda_graphs")
    order = convert_schedule_table_to_order(*case)
    assert order == theirs.convert_schedule_table_to_order(*case)


@st.composite
def chunk_orders(draw):
    """Draw an order of chunks and the number of layers per chunk."""
    warmup, chunks, table = draw(schedules())
    order = convert_schedule_table_to_order(warmup, chunks, table)
    return order, draw(st.lists(st.integers(0, 4), min_size=chunks, max_size=chunks))


@given(chunk_orders(), st.booleans())
def test_layer_order_equals_megatron_core(case, with_weight_gradients):
    theirs = replaced("megatron.core.transformer.cuda_graphs")
    order, layers = case
    ours = get_overlap_moe_expert_parallel_comm_order(order, layers, with_weight_gradients)
    assert ours == theirs.get_overlap_moe_expert_parallel_comm_order(order, layers, with_weight_gradients)


def test_uncaptured_layers_take_their_turns():
    """Check that micro-batch 0's last backward precedes micro-batch 1's second forward if the first layer is eager."""
    order = get_overlap_moe_expert_parallel_comm_order([1, -1, 1, -1], [2], False, [[None, 0, 1]])
    assert order == ([1, 2, -2, 1, -1, 2, -2, -1], [[0, 0], [0, 1], None, [0, 0], None, [0, 1], None, None])
