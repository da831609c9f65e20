"""Run every test of this folder on the CPU backend."""

import pytest
import torch

from tests.support.ranks.on_cpu_backend import on_cpu_backend


@pytest.fixture(autouse=True, scope="module")
def _cpu_backend():
    with on_cpu_backend():
        yield


@pytest.fixture(autouse=True)
def _side_stream():
    """Run on a side stream, as captures require."""
    torch.manual_seed(1234)
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    assert not torch.cuda.is_current_stream_capturing()


def capture(body, *generators, **options):
    """Capture ``body`` with registered ``generators``; return the graph and the result."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, **options):
        result = body()
    return graph, result
