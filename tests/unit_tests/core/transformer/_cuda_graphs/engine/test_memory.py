"""Test weak references to tensors, and the detection of memory that belongs to a pool."""

import gc
from contextlib import nullcontext

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.transformer._cuda_graphs.engine.memory import (
    REUSE_OPTION,
    PoolMemory,
    allocator_settings,
    reuse_across_streams,
    storage_address,
    weak_reference,
)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4)[1:, ::2].requires_grad_(),
        torch.arange(12.0, dtype=torch.bfloat16).view(3, 4).t(),
        torch.zeros(0, 3),
        torch.arange(12.0).view(3, 2, 2).view(torch.complex64).conj(),
        torch._neg_view(torch.arange(3.0)),
    ],
    ids=["part", "transposed bf16", "empty", "conjugate", "negative"],
)
def test_weak_reference_has_the_same_layout(tensor):
    weak = weak_reference(tensor)
    assert weak.data_ptr() == tensor.data_ptr()
    assert (weak.shape, weak.stride(), weak.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert not weak.requires_grad
    assert torch.equal(weak, tensor)


def test_weak_reference_does_not_hold_memory():
    tensor = torch.zeros(4)
    storage = StorageWeakRef(tensor.untyped_storage())
    weak = weak_reference(tensor)
    del tensor
    gc.collect()
    assert storage.expired()
    assert weak.shape == (4,)


def captured(pool, make):
    """Capture ``make()`` into ``pool``; return the graph and the result."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        made = make()
    return graph, made


@pytest.mark.usefixtures("cpu_backend")
class TestPoolMemory:
    def test_pool_owns_tensors_of_its_graphs_only(self):
        before = torch.ones(3, device="cuda")
        graph, made = captured(torch.cuda.graph_pool_handle(), lambda: (before * 2, before.view(3, 1)))
        after = torch.ones(3, device="cuda")
        memory = PoolMemory.of(graph)
        assert memory.owned([before, *made, after]) == {storage_address(made[0])}
        _graph, other = captured(torch.cuda.graph_pool_handle(), lambda: before * 2)
        _second, later = captured(graph.pool(), lambda: before * 3)
        assert memory.owned([made[0], other, later]) == {storage_address(made[0]), storage_address(later)}

    @pytest.mark.parametrize(("number", "is_passed"), [(256, True), (257, False)])
    def test_only_small_pool_numbers_are_queried(self, monkeypatch, number, is_passed):
        """Check that pool ids above 256 are not passed to torch, which releases these integers once too often.

        CPython never frees integers up to 256.
        """
        asked = []

        def snapshot(mempool_id, include_traces):
            asked.append(mempool_id)
            return []

        monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
        PoolMemory((0, number)).size()
        assert asked == [(0, number) if is_passed else None]


@pytest.fixture
def configure():
    """Yield a function that configures the allocator, and restore the defaults after the test."""
    yield torch._C._accelerator_setAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(f"{REUSE_OPTION}:False")
    torch._C._accelerator_setAllocatorSettings("")


@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("configured", ["", "max_split_size_mb:512,garbage_collection_threshold:0.5"])
def test_memory_is_reused_across_streams_in_captures(configure, configured, error):
    configure(configured)
    before = allocator_settings()
    with pytest.raises(ZeroDivisionError) if error else nullcontext(), reuse_across_streams():
        assert allocator_settings() == before | {
            REUSE_OPTION: True,
            "PYTORCH_CUDA_ALLOC_CONF": ",".join(filter(None, [configured, f"{REUSE_OPTION}:True"])),
        }
        assert not error or 1 / 0
    assert allocator_settings() == before
    assert not before[REUSE_OPTION]


@pytest.mark.parametrize("wanted", [False, True])
def test_environment_variable_takes_precedence(configure, wanted):
    configure(f"{REUSE_OPTION}:{wanted}")
    with reuse_across_streams():
        assert allocator_settings()[REUSE_OPTION] is wanted
    assert allocator_settings()[REUSE_OPTION] is wanted
