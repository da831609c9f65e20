"""Test that local graphs on a GPU reuse the memory of earlier graphs."""

import pytest
import torch

from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.transformer.cuda_graphs import CudaGraphManager, create_cudagraphs, delete_cuda_graphs
from tests.unit_tests.core.transformer._cuda_graphs.local.local_graph_cases import (
    HIDDEN,
    Layer,
    Stack,
    use_graphable_rng,
)

WIDTH = 2048


@pytest.fixture
def trackers(monkeypatch):
    """Restore the RNG trackers after the test."""
    for name in ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"):
        monkeypatch.setattr(tensor_parallel_random, name, getattr(tensor_parallel_random, name))


def memory_of_graphs(layers: int) -> int:
    """Return the bytes held by the graphs of ``layers`` layers with main gradients."""
    with torch.cuda.stream(torch.cuda.Stream()):
        model = Stack([Layer(number + 1) for number in range(layers)])
        for module in (model.before, model.after, *(layer.linear for layer in model.layers)):
            module.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
            module.bias = torch.nn.Parameter(torch.zeros(WIDTH))
        model.cuda()
        nodes = []
        for layer in model.layers:
            for param in layer.parameters():
                param.main_grad = torch.zeros_like(param)
                # DistributedDataParallel keeps the node on this stream alive.
                nodes.append(param.expand_as(param).grad_fn.next_functions[0][0])
        model(torch.randn(4, WIDTH, device="cuda")).square().mean().backward()
        assert create_cudagraphs() is not None
        pool = CudaGraphManager.global_mempool
        assert pool is not None
        segments = [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) == tuple(pool)]
        delete_cuda_graphs()
    return sum(segment["total_size"] for segment in segments)


def test_gradients_of_layers_share_memory(trackers):
    delete_cuda_graphs()
    use_graphable_rng()
    memory_of_graphs(1)  # triggers one-time allocations
    gradient = WIDTH * WIDTH * 4
    few, many = memory_of_graphs(2), memory_of_graphs(10)
    assert few > 0
    assert many - few < 4 * gradient


def test_model_built_on_the_default_stream_trains_with_graphs(trackers):
    assert torch.cuda.current_stream() == torch.cuda.default_stream()

    def train(graphs):
        delete_cuda_graphs()
        torch.manual_seed(5)
        use_graphable_rng()
        model = Stack([Layer(number + 1, graphs) for number in range(2)]).cuda()
        # DistributedDataParallel keeps the node on this stream alive.
        nodes = [param.expand_as(param).grad_fn.next_functions[0][0] for param in model.parameters()]
        losses = []
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            loss = model(torch.randn(4, HIDDEN, generator=generator).cuda()).square().mean()
            loss.backward()
            create_cudagraphs()
            losses.append([loss.item(), *(param.grad.tolist() for param in model.parameters())])
            model.zero_grad()
        calls = [layer.calls.count for layer in model.layers]
        delete_cuda_graphs()
        del nodes
        return losses, calls

    (eager, _), (graphed, calls) = train(graphs=False), train(graphs=True)
    assert graphed == eager
    assert calls == [1 + 2 + 1] * 2  # the recorded step, two warm-up passes, and the capture
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
