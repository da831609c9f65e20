"""Test when graph pools reuse or free memory, and that replays reject memory freed or moved after capture."""

import functools
import gc

import pytest
import torch

from megatron_fsdp_cuda_graphs.cpu_backend import StaleAddress

from .conftest import capture


def test_memory_freed_in_the_capture_stays_in_the_graph():
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


def test_next_graph_of_the_pool_can_resize_freed_memory():
    """Check that a backward graph can recompute activations into memory that the forward graph freed."""
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


def test_second_storage_need_not_outlive_the_capture():
    x = torch.ones(4, device="cuda")

    def body():
        y = x * 2
        return weak(y) + 1

    graph, z = capture(body)
    graph.replay()
    assert z.tolist() == [3] * 4


def test_deleted_resized_output_is_not_overwritten():
    x = torch.ones(4, device="cuda")
    first, y = capture(lambda: x + 1)
    y.untyped_storage().resize_(0)
    del y
    second, z = capture(lambda: x + 3, pool=first.pool())
    second.replay()
    assert z.tolist() == [4] * 4


def test_reset_of_the_last_graph_frees_the_pool():
    x = torch.ones(4, device="cuda")
    graph, y = capture(lambda: x * 2)
    reference = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
    del y
    gc.collect()
    assert not reference.expired()
    graph.reset()
    gc.collect()
    assert reference.expired()


def weak(tensor):
    """Return a tensor that does not own its memory."""
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype, device="cuda").set_(memory, 0, tensor.size(), tensor.stride())


def two_graphs_of_one_pool(held: bool):
    """Return a graph's output after its own replay, and after the replay of a second graph from the same pool.

    If ``held``, a tensor keeps the output alive during the second capture.
    """
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


def test_next_graph_overwrites_unreferenced_memory():
    before, after = two_graphs_of_one_pool(held=False)
    assert before == [4.0] * 4
    assert all(value != value for value in after)


def test_referenced_memory_is_not_overwritten():
    assert two_graphs_of_one_pool(held=True) == ([4.0] * 4, [4.0] * 4)


def freed(x):
    del x[0]
    gc.collect()


def moved(x):
    x[0].untyped_storage().resize_(1 << 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (freed, r"was freed.*aten\.add.*\(3, 5\)"),
        (lambda x: x[0].untyped_storage().resize_(0), "was resized from 60 to 0 bytes"),
        (moved, "was moved"),
    ],
    ids=["freed", "resized", "moved"],
)
def test_changed_input_raises_before_any_write(change, message):
    inputs, total = [torch.ones(3, 5, device="cuda")], torch.zeros(3, 5, device="cuda")
    graph, _ = capture(lambda: total.add_(inputs[0]))
    assert graph.op_count == 1
    change(inputs)
    with pytest.raises(StaleAddress, match=message):
        graph.replay()
    assert not total.any()


def test_any_graph_keeps_the_pool_alive():
    x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    pool = torch.cuda.graph_pool_handle()
    first, y = capture(lambda: x * 2, pool=pool)
    second, _ = capture(functools.partial(torch.add, y, 1, out=out), pool=pool)
    assert first.pool() == second.pool() == pool
    first.replay()
    first.reset()
    del y
    gc.collect()
    second.replay()
    assert out.tolist() == [3] * 4
