"""Test the order of passes in pipeline schedules."""

from megatron.core.transformer._cuda_graphs.te.capture_arguments import captured_passes
from megatron.core.transformer.cuda_graphs import get_overlap_moe_expert_parallel_comm_order


def test_uncaptured_layers_take_their_turns():
    """Check that eager layers keep their position in the order of captured passes."""
    scheduled = [["eager", "a", "b"]]
    order = get_overlap_moe_expert_parallel_comm_order([1, -1, 1, -1], [3], False)
    captured = captured_passes(order, scheduled, [["a", "b"]])
    assert captured == ([1, 2, -2, 1, -1, 2, -2, -1], [[0, 0], [0, 1], None, [0, 0], None, [0, 1], None, None])
    with_weight_gradients = get_overlap_moe_expert_parallel_comm_order([1, 2, -2, -1], [1, 3], True)
    order = captured_passes(with_weight_gradients, [["a"], ["b", "eager", "c"]], [["a"], ["b", "c"]])[0]
    assert order == [1, 2, 3, -3, -3.5, -2, -2.5, -1, -1.5]
