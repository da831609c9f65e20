"""Memory that a graph uses must stand where it stood; what a capture allocated lives as long as its pool."""

import copy
import functools
import gc
import pickle

import pytest
import torch

from megatron_fsdp_cuda_graphs.cpu_backend import StaleAddress


def capture(body, **options):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        result = body()
    return graph, result


def test_a_freed_input_is_an_error_that_names_operator_and_shape():
    x = torch.ones(3, 5, device="cuda")
    graph, _ = capture(x.clone)
    del x
    gc.collect()
    with pytest.raises(StaleAddress, match=r"was freed.*aten\.clone.*\(3, 5\)"):
        graph.replay()


def test_a_graph_does_not_keep_its_inputs_alive():
    x = torch.ones(4, device="cuda")
    reference = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
    graph, _ = capture(x.clone)
    del x
    gc.collect()
    assert reference.expired()
    assert graph.op_count == 1


def test_a_resized_input_is_an_error():
    x = torch.ones(4, device="cuda")
    graph, _ = capture(lambda: x + 1)
    x.untyped_storage().resize_(0)
    with pytest.raises(StaleAddress, match="was resized from 16 to 0 bytes"):
        graph.replay()


def test_a_moved_input_is_an_error():
    x = torch.ones(4, device="cuda")
    graph, _ = capture(lambda: x + 1)
    pointer = x.data_ptr()
    x.untyped_storage().resize_(1 << 20)
    assert x.data_ptr() != pointer
    with pytest.raises(StaleAddress, match="was moved"):
        graph.replay()


def test_a_stale_replay_touches_nothing():
    x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    graph, _ = capture(functools.partial(y.add_, x))
    del x
    gc.collect()
    with pytest.raises(StaleAddress):
        graph.replay()
    assert y.tolist() == [0] * 4


def test_an_output_freed_through_its_storage_is_an_error():
    x = torch.ones(4, device="cuda")
    graph, y = capture(lambda: x + 1)
    y.untyped_storage().resize_(0)
    with pytest.raises(StaleAddress, match="was resized from 16 to 0 bytes"):
        graph.replay()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_graph_cannot_be_copied(copied):
    x = torch.ones(4, device="cuda")
    graph, y = capture(lambda: x + 1)
    with pytest.raises(TypeError, match="cannot pickle 'CUDAGraph' object"):
        copied(graph)
    graph.replay()
    assert y.tolist() == [2] * 4


# ------------------------------------------------------------------------------------ storages resized in the capture


def test_memory_given_back_in_the_capture_stays_the_graphs():
    x = torch.ones(2, 4, device="cuda")

    def body():
        y = (x * 2).t()
        z = y.exp() + 1
        y.untyped_storage().resize_(0)
        return z

    graph, z = capture(body)
    for value in (1.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(z, (x * 2).t().exp() + 1)


def test_memory_given_back_may_be_made_again_by_the_next_graph_of_the_pool():
    """What recomputation without outputs does: the backward graph fills the storage that the forward graph let go."""
    x, weight = torch.ones(4, device="cuda"), torch.full((4,), 3.0, device="cuda", requires_grad=True)

    def forward():
        y = x * 2
        z = y * weight
        y.untyped_storage().resize_(0)
        return y, z

    def backward():
        y.untyped_storage().resize_(16)
        y.data.copy_(x * 2)
        return torch.autograd.grad(z.sum(), weight)[0]

    first, (y, z) = capture(forward)
    second, grad = capture(backward, pool=first.pool())
    for value in (1.0, 5.0):
        x.fill_(value)
        first.replay()
        second.replay()
        assert z.tolist() == [6 * value] * 4
        assert grad.tolist() == [2 * value] * 4


def test_a_second_storage_on_memory_of_the_capture_need_not_outlive_it():
    x = torch.ones(4, device="cuda")

    def body():
        y = x * 2
        return weak(y) + 1

    graph, z = capture(body)
    graph.replay()
    assert z.tolist() == [3] * 4


def test_an_output_that_was_resized_and_let_go_is_not_overwritten():
    x = torch.ones(4, device="cuda")
    first, y = capture(lambda: x + 1)
    y.untyped_storage().resize_(0)
    del y
    second, z = capture(lambda: x + 3, pool=first.pool())
    second.replay()
    assert z.tolist() == [4] * 4


def test_memory_allocated_in_a_capture_outlives_the_tensors():
    x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")

    def body():
        temporary = x * 2
        out.copy_(temporary + 1)

    graph, _ = capture(body)
    gc.collect()
    graph.replay()
    assert out.tolist() == [3] * 4


def test_a_second_graph_of_a_pool_keeps_the_first_ones_memory_alive():
    x = torch.ones(4, device="cuda")
    pool = torch.cuda.graph_pool_handle()
    first, y = capture(lambda: x * 2, pool=pool)
    second, z = capture(functools.partial(torch.add, y, 1), pool=pool)
    assert first.pool() == second.pool() == pool
    first.replay()
    first.reset()
    del y
    gc.collect()
    second.replay()
    assert z.tolist() == [3] * 4


def test_reset_frees_the_memory_of_the_last_graph_of_a_pool():
    x = torch.ones(4, device="cuda")
    graph, y = capture(lambda: x * 2)
    reference = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
    del y
    gc.collect()
    assert not reference.expired()
    graph.reset()
    gc.collect()
    assert reference.expired()


# ---------------------------------------------------------------------------------------------- memory that is let go


def weak(tensor):
    """A tensor of the same memory that does not hold it."""
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype, device="cuda").set_(memory, 0, tensor.size(), tensor.stride())


def two_graphs_of_one_pool(held: bool):
    """The output of a graph, held or not while another is captured, after replays of the first and of both."""
    x = torch.ones(4, device="cuda")
    first, y = capture(lambda: (x + 1) * 2)
    output = weak(y)
    if not held:
        del y
    second, _ = capture(lambda: x + 3, pool=first.pool())
    first.replay()
    before = output.clone()
    second.replay()
    return before.tolist(), output.tolist()


def test_the_next_graph_of_the_pool_overwrites_memory_that_nobody_holds():
    before, after = two_graphs_of_one_pool(held=False)
    assert before == [4.0] * 4
    assert all(value != value for value in after)


def test_memory_that_somebody_holds_is_not_overwritten():
    assert two_graphs_of_one_pool(held=True) == ([4.0] * 4, [4.0] * 4)


def test_a_graph_of_another_pool_overwrites_nothing():
    x = torch.ones(4, device="cuda")
    first, y = capture(lambda: x + 1)
    output = weak(y)
    del y
    second, _ = capture(lambda: x + 3)
    first.replay()
    second.replay()
    assert output.tolist() == [2.0] * 4
