"""record and manager: graphs can use generators whose state was set in inference mode, as inference engines do."""

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine import rng
from megatron.core.transformer.cuda_graphs import CudaGraphManager

from .local_graph_cases import Layer, batch, groups, record, stack, use_graphable_rng

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


@pytest.fixture
def events(monkeypatch):
    """Each generator that is made safe for graphs, and None where a graph begins to record."""
    seen: list[torch.Generator | None] = []
    make_safe, begin = rng._ensure_generator_state_is_cudagraph_safe, torch.cuda.CUDAGraph.capture_begin

    def making_safe(generator):
        seen.append(generator)
        return make_safe(generator)

    def beginning(graph, *args, **kwargs):
        seen.append(None)
        begin(graph, *args, **kwargs)

    monkeypatch.setattr(rng, "_ensure_generator_state_is_cudagraph_safe", making_safe)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", beginning)
    return seen


def assert_all_are_safe_before_the_first_capture(events):
    default, *named = events[: events.index(None)]
    assert isinstance(default, torch.Generator)
    assert len(named) == len(rng.generator_states()) == 1


def test_of_graphs_that_a_training_step_recorded(events):
    record(stack(count=1))
    assert_all_are_safe_before_the_first_capture(events)


def test_of_graphs_that_are_captured_at_once(events):
    use_graphable_rng()
    layer = Layer(graphs=False).cuda().eval()
    layer.manager = CudaGraphManager(
        layer.config, layer, "forward", need_backward=False, inline_capture=True, pg_collection=groups()
    )
    layer(batch(0))
    assert_all_are_safe_before_the_first_capture(events)
