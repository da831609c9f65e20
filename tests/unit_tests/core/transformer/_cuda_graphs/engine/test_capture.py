"""Test consecutive captures, and the process state after a failed capture."""

import gc
import weakref

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.graph import Capture

pytestmark = pytest.mark.usefixtures("cpu_backend")


class Failure(Exception):
    """Raised to make a capture fail."""


@pytest.mark.parametrize("step", ["capture_begin", "capture_end"])
def test_capture_works_after_a_failed_begin_or_end(step, monkeypatch):
    capture = Capture(None)
    real = getattr(torch.cuda.CUDAGraph, step)

    def fail_once(graph, *args, **kwargs):
        monkeypatch.setattr(torch.cuda.CUDAGraph, step, real)
        if step == "capture_begin":
            real(graph, *args, **kwargs)
        raise Failure

    monkeypatch.setattr(torch.cuda.CUDAGraph, step, fail_once)
    x = torch.ones(3, device="cuda")
    with pytest.raises(Failure), capture.recording(capture.new_graph()):
        x * 2
    assert not torch.cuda.is_current_stream_capturing()
    torch.randn(2, device="cuda")  # raises if a generator is still in capture mode
    another = Capture(None)  # new pool: torch rejects a pool whose graphs are all deleted
    graph = another.new_graph()
    with another.recording(graph):
        y = x * 3
    graph.replay()
    assert y.tolist() == [3, 3, 3]


@pytest.mark.parametrize("step", ["register_generator_state", "capture_begin"])
def test_graph_unknown_to_a_generator_is_never_freed(step, monkeypatch):
    """Check that a graph is kept alive if ``step`` fails, because freeing it would abort the process."""
    graphs: list[weakref.ref] = []

    def fail(graph, *args, **kwargs):
        graphs.append(weakref.ref(graph))
        raise torch.OutOfMemoryError

    capture = Capture(None)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda.CUDAGraph, step, fail)
        with pytest.raises(torch.OutOfMemoryError), capture.recording(capture.new_graph()):
            pass
    gc.collect()
    assert graphs
    assert None not in [graph() for graph in graphs]
    another = weakref.ref(capture.new_graph())
    assert another() is None


def test_capture_error_is_raised_if_cleanup_fails(monkeypatch):
    capture = Capture(None)
    graph = capture.new_graph()
    attempts: list[int] = []

    def fail(graph, *args, **kwargs):
        attempts.append(1)
        raise Failure(f"attempt {len(attempts)}")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", fail)
    with pytest.raises(Failure, match="attempt 1") as error, capture.recording(graph):
        raise AssertionError("not reached")
    assert error.value.__notes__ == ["Cleanup after the failed capture also failed: attempt 2"]
