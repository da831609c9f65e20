"""What tests of local graphs look at."""

from collections.abc import Callable

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine import rng


@pytest.fixture
def generators_made_safe(cpu_backend, monkeypatch) -> Callable[[], bool]:
    """Says whether every generator was made safe for graphs when the first capture began."""
    safe: list[torch.Generator] = []
    complete: list[bool] = []
    make_safe, begin = rng._ensure_generator_state_is_cudagraph_safe, torch.cuda.CUDAGraph.capture_begin

    def note(generator):
        safe.append(generator)
        return make_safe(generator)

    def capture_begin(graph, *args, **kwargs):
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        complete.append(default in safe and len(safe) == 1 + len(rng.generator_states()))
        return begin(graph, *args, **kwargs)

    monkeypatch.setattr(rng, "_ensure_generator_state_is_cudagraph_safe", note)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", capture_begin)
    return lambda: complete[0]
