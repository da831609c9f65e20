"""Test streams and events, inside and outside captures."""

import pytest
import torch

from megatron_fsdp_cuda_graphs.cpu_backend import CaptureError


def test_accelerator_api_returns_the_current_stream():
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        torch.ones(1, device="cuda").add_(1)
        assert torch.accelerator.current_stream() == stream
        assert stream.is_capturing() and not other.is_capturing()
    assert not stream.is_capturing()


def test_work_on_a_joined_stream_is_captured():
    x, side, graph = torch.ones(2, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            x.add_(1)
        torch.cuda.current_stream().wait_stream(side)
    assert x.tolist() == [1, 1]
    graph.replay()
    assert x.tolist() == [2, 2]


def test_work_on_another_stream_is_not_captured():
    x, side, graph = torch.ones(2, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    y = torch.ones(2, device="cuda")
    with torch.cuda.graph(graph):
        y.add_(1)
        with torch.cuda.stream(side):
            assert not torch.cuda.is_current_stream_capturing()
            x.add_(1)
    graph.replay()
    assert x.tolist() == [2, 2]


@pytest.mark.parametrize("use", ["query", "synchronize", "wait"])
def test_events_of_an_ended_capture_raise(use):
    event, x = torch.cuda.Event(), torch.ones(2, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        event.record()
    with pytest.raises(CaptureError, match="event last recorded in a capturing stream"):
        getattr(event, use)()
    event.record()
    getattr(event, use)()


def test_external_events_work_across_captures():
    event, x = torch.cuda.Event(external=True), torch.ones(2, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        event.record()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        event.wait()
        x.add_(1)
    event.wait()


def joined_with_work():
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.ones(2, device="cuda").add_(1)


def waited_for_by_the_default_stream():
    with pytest.raises(CaptureError, match="legacy stream"):
        torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())


def waits_for_work_outside():
    with pytest.raises(CaptureError, match="dependency created on uncaptured work in another stream"):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (joined_with_work, "unjoined work"),
        (waited_for_by_the_default_stream, "previous error"),
        (waits_for_work_outside, "previous error"),
        (lambda: torch.cuda.set_stream(torch.cuda.Stream()), "same stream"),
    ],
)
def test_invalid_captures_raise_at_the_end(body, message):
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    body()
    with pytest.raises(RuntimeError, match=message):
        graph.capture_end()
