"""pool: the memory pool of local graphs outlives its graphs."""

import gc

import pytest
import torch

from megatron.core.transformer.cuda_graphs import (
    ArgMetadata,
    CudaGraphManager,
    _CudagraphGlobalRecord,
    alloc_tensor_from_graph_mempool,
    delete_cuda_graphs,
)
from megatron_fsdp_cuda_graphs.cpu_backend.memory import pool_of

from .local_graph_cases import Layer, batch, config, groups, use_graphable_rng

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


def captured_and_gone() -> tuple:
    """Capture a graph and let it go with its module; return the pool."""
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


def test_a_pool_whose_graphs_are_gone_is_captured_into_again():
    pool = captured_and_gone()
    layer = Layer(1, graphs=False).cuda()
    CudaGraphManager(config(), layer, "forward", False, groups(), inline_capture=True)
    with torch.no_grad():
        replayed, eager = layer(batch(1)), layer(batch(1), eager=True)
    assert torch.equal(replayed[0], eager[0])
    assert CudaGraphManager.global_mempool == pool


def test_tensors_are_allocated_from_a_pool_that_has_no_graph_yet():
    meta = ArgMetadata(torch.ones(2, 3, device="cuda"))
    assert torch.equal(alloc_tensor_from_graph_mempool(meta), torch.zeros(2, 3, device="cuda"))
    assert pool_of(CudaGraphManager.global_mempool)


def test_deleting_graphs_lets_the_pool_go():
    pool = captured_and_gone()
    delete_cuda_graphs()
    assert CudaGraphManager.global_mempool is None
    with pytest.raises(RuntimeError, match="use_count"):
        pool_of(pool)
