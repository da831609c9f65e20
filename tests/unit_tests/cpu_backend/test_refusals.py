"""Test that operations forbidden in a capture raise, and that a failed capture has no side effects."""

import pytest
import torch

from megatron_fsdp_cuda_graphs.cpu_backend import CaptureError

from .conftest import capture

NOT_PERMITTED = "operation not permitted when stream is capturing"


@pytest.fixture
def x():
    return torch.tensor([1.0, 0.0, 2.0], device="cuda")


WAITS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0]),
    "nonzero": lambda x: x.nonzero(),
    "bool mask": lambda x: x[x > 0],
    "mask with many values": lambda x: x.index_put_((x > 0,), torch.ones_like(x[:2])),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "bincount": lambda x: x.long().bincount(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "device synchronize": lambda x: torch.cuda.synchronize(),
    "stream synchronize": lambda x: torch.cuda.current_stream().synchronize(),
    "stream query": lambda x: torch.cuda.current_stream().query(),
    "event synchronize": lambda x: torch.cuda.Event().synchronize(),
    "event query": lambda x: torch.cuda.Event().query(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_synchronization_raises(wait, x):
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    with pytest.raises(torch.AcceleratorError, match=NOT_PERMITTED):
        wait(x)
    with pytest.raises(torch.AcceleratorError, match="operation failed due to a previous error during capture"):
        graph.capture_end()
    assert not torch.cuda.is_current_stream_capturing()


ALLOWED = {
    "one value under a mask": lambda x: x.clone().index_put_((x > 0,), torch.zeros((), device="cuda")),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "known output size": lambda x: x.repeat_interleave(x.long(), output_size=3),
    "integer index": lambda x: x[x.long()],
}


@pytest.mark.parametrize("operation", ALLOWED.values(), ids=ALLOWED.keys())
def test_capturable_operations_pass(operation, x):
    graph, _ = capture(lambda: operation(x))
    graph.replay()


def test_capture_on_the_default_stream_raises():
    torch.cuda.set_stream(torch.cuda.default_stream())
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_host_scalars_become_constants(x):
    scalar = torch.tensor(2.0)
    y = torch.zeros(3, device="cuda")
    graph, _ = capture(lambda: y.copy_(x * scalar))
    scalar.fill_(100)
    graph.replay()
    assert y.tolist() == [2, 0, 4]


def test_host_operations_run_at_capture_only():
    host = torch.zeros(3)
    with pytest.warns(UserWarning, match="The CUDA Graph is empty"):
        graph, _ = capture(lambda: host.add_(1))
    graph.replay()  # an empty graph does nothing, as on a GPU
    assert host.tolist() == [1, 1, 1]
    assert graph.replays == 1


@torch.library.custom_op("cpu_backend_test::double", mutates_args=())
def double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


REFUSED = {
    "a capture in a capture": (lambda x: torch.cuda.CUDAGraph().capture_begin(), NOT_PERMITTED),
    "a replay in a capture": (lambda x: x.graph.replay(), NOT_PERMITTED),
    "a copy of host data": (lambda x: torch.tensor([1.0], device="cuda"), "Cannot copy between CPU and CUDA tensors"),
    "a host tensor": (lambda x: x + torch.ones(3), "takes a host tensor of shape"),
    "a custom operator": (double, r"cpu_backend_test\.double"),
}


@pytest.mark.parametrize(("operation", "message"), REFUSED.values(), ids=REFUSED)
def test_failed_capture_leaves_no_trace(operation, message, x):
    x.graph, _ = capture(lambda: x + 1)
    graph = torch.cuda.CUDAGraph()

    def body():
        with torch.cuda.graph(graph):
            x.add_(1)
            operation(x)

    with pytest.raises(CaptureError, match=message):
        body()
    assert x.tolist() == [1, 0, 2]
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    torch.cuda.set_stream(torch.cuda.Stream())  # torch.cuda.graph leaves its stream current when capture_end raises
    following, _ = capture(lambda: x.add_(1))
    following.replay()
    assert x.tolist() == [2, 1, 3]


def test_reset_allows_another_capture(x):
    graph, _ = capture(lambda: x.add_(1))
    with pytest.raises(RuntimeError, match="already owns a captured graph"):
        graph.capture_begin()
    graph.reset()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with torch.cuda.graph(graph):
        x.add_(10)
    graph.replay()
    assert x.tolist() == [11, 10, 12]
