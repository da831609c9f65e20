"""Test that static tensors have one user at a time, and that the memory pool outlives its graphs."""

import gc

import pytest
import torch

from megatron.core.transformer._cuda_graphs.local.memory import StaticInput
from megatron.core.transformer.cuda_graphs import (
    ArgMetadata,
    CudaGraphManager,
    TensorReusePool,
    _CudagraphGlobalRecord,
    delete_cuda_graphs,
)
from megatron_fsdp_cuda_graphs.cpu_backend.memory import pool_of

from .local_graph_cases import Layer, batch, config, groups, use_graphable_rng


def never():
    return False


def meta(shape=(2, 3)):
    return ArgMetadata(torch.empty(shape))


class TestTensorReusePool:
    def test_foreign_tensor_is_refused(self):
        with pytest.raises(ValueError, match=r"shape \(2, 3\) does not belong to this pool"):
            TensorReusePool().insert(torch.empty(2, 3))

    def test_second_return_is_refused(self):
        pool = TensorReusePool()
        lent = pool.get(meta())
        pool.insert(lent)
        with pytest.raises(ValueError, match="released more often"):
            pool.insert(lent)


class TestStaticInput:
    def test_input_written_by_graphs_is_copied_again(self):
        static = StaticInput(torch.zeros(2), only_copied_to=False)
        value = torch.ones(2)
        static.put(value, in_use=never)
        static.tensor.fill_(7)
        static.put(value, in_use=never)
        assert static.tensor.tolist() == [1, 1]

    def test_inference_tensors_are_always_copied(self):
        static = StaticInput(torch.zeros(2), only_copied_to=True)
        with torch.inference_mode():
            value = torch.ones(2)
            static.put(value, in_use=never)
            value.add_(1)
            static.put(value, in_use=never)
        assert static.tensor.tolist() == [2, 2]

    def test_another_view_of_the_memory_is_accepted(self):
        static = StaticInput(torch.arange(4.0).view(2, 2), only_copied_to=True)
        static.put(static.tensor.t(), in_use=never)
        assert static.tensor.tolist() == [[0, 2], [1, 3]]


def captured_and_gone() -> tuple:
    """Capture a graph, delete it and its module, and return the pool."""
    use_graphable_rng()
    layer = Layer(1, graphs=False).cuda()
    manager = CudaGraphManager(config(), layer, "forward", False, groups(), inline_capture=True)
    with torch.no_grad():
        layer(batch(0))
    pool = CudaGraphManager.global_mempool
    assert pool is not None
    _CudagraphGlobalRecord.cudagraph_inference_record = []
    _CudagraphGlobalRecord.cudagraph_created = False
    del layer, manager
    gc.collect()
    return pool


@pytest.mark.usefixtures("cpu_backend", "no_graphs")
def test_pool_without_graphs_can_be_captured_into():
    pool = captured_and_gone()
    layer = Layer(1, graphs=False).cuda()
    CudaGraphManager(config(), layer, "forward", False, groups(), inline_capture=True)
    with torch.no_grad():
        replayed, eager = layer(batch(1)), layer(batch(1), eager=True)
    assert torch.equal(replayed[0], eager[0])
    assert CudaGraphManager.global_mempool == pool


@pytest.mark.usefixtures("cpu_backend", "no_graphs")
def test_deleting_graphs_releases_pool():
    pool = captured_and_gone()
    delete_cuda_graphs()
    assert CudaGraphManager.global_mempool is None
    with pytest.raises(RuntimeError, match="use_count"):
        pool_of(pool)
