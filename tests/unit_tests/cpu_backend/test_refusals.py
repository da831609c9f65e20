"""What CUDA refuses during a capture is refused here, and a refused capture leaves nothing behind."""

import pytest
import torch

from megatron_fsdp_cuda_graphs.cpu_backend import CaptureError

NOT_PERMITTED = "operation not permitted when stream is capturing"


def capture(body, **options):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        body()
    return graph


@pytest.fixture
def x():
    return torch.tensor([1.0, 0.0, 2.0], device="cuda")


WAITS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0]),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "bool mask": lambda x: x[x > 0],
    "mask with many values": lambda x: x.index_put_((x > 0,), torch.ones_like(x[:2])),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "bincount": lambda x: x.long().bincount(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "print": lambda x: repr(x),
    "device synchronize": lambda x: torch.cuda.synchronize(),
    "stream synchronize": lambda x: torch.cuda.current_stream().synchronize(),
    "stream query": lambda x: torch.cuda.current_stream().query(),
    "event synchronize": lambda x: torch.cuda.Event().synchronize(),
    "event query": lambda x: torch.cuda.Event().query(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_a_wait_for_the_device_is_refused(wait, x):
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
def test_what_a_gpu_can_capture_is_not_refused(operation, x):
    graph = capture(lambda: operation(x))
    graph.replay()


def test_after_a_refusal_the_next_capture_works(x):
    with pytest.raises(CaptureError):
        capture(lambda: x.sum().item())
    torch.cuda.set_stream(torch.cuda.Stream())  # torch.cuda.graph leaves its stream current when capture_end raises
    graph = capture(lambda: x.add_(1))
    graph.replay()
    assert x.tolist() == [2, 1, 3]


def test_a_refused_capture_takes_its_writes_back(x):
    with pytest.raises(CaptureError):
        capture(lambda: x.add_(1).sum().item())
    assert x.tolist() == [1, 0, 2]


def test_a_refused_capture_cannot_be_replayed(x):
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError), torch.cuda.graph(graph):
        x.sum().item()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def test_an_exception_of_the_captured_function_ends_the_capture(x):
    with pytest.raises(KeyError):
        capture(lambda: {}[x])
    assert not torch.cuda.is_current_stream_capturing()


def test_a_capture_in_a_capture_is_refused(x):
    with pytest.raises(CaptureError, match=NOT_PERMITTED):
        capture(lambda: torch.cuda.CUDAGraph().capture_begin())


def test_a_replay_in_a_capture_is_refused(x):
    inner = capture(lambda: x + 1)
    with pytest.raises(CaptureError, match=NOT_PERMITTED):
        capture(inner.replay)


def test_the_legacy_default_stream_cannot_capture():
    torch.cuda.set_stream(torch.cuda.default_stream())
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_host_data_cannot_be_copied_in_a_capture(x):
    with pytest.raises(CaptureError, match="Cannot copy between CPU and CUDA tensors"):
        capture(lambda: x + torch.tensor([1.0, 2.0, 3.0], device="cuda"))


def test_host_tensors_do_not_mix_with_device_tensors_in_a_capture(x):
    host = torch.ones(3)
    with pytest.raises(CaptureError, match="takes a host tensor of shape"):
        capture(lambda: x + host)


def test_a_host_scalar_is_baked_in(x):
    scalar = torch.tensor(2.0)
    y = torch.zeros(3, device="cuda")
    graph = capture(lambda: y.copy_(x * scalar))
    scalar.fill_(100)
    graph.replay()
    assert y.tolist() == [2, 0, 4]


def test_host_work_is_done_at_capture_and_only_then():
    host = torch.zeros(3)
    with pytest.warns(UserWarning, match="The CUDA Graph is empty"):
        graph = capture(lambda: host.add_(1))
    graph.replay()  # an empty graph does nothing, as on a GPU
    assert host.tolist() == [1, 1, 1]
    assert graph.replays == 1


def test_a_custom_operator_is_refused_by_name(x):
    @torch.library.custom_op("cpu_backend_test::double", mutates_args=())
    def double(t: torch.Tensor) -> torch.Tensor:
        return t * 2

    with pytest.raises(CaptureError, match=r"cpu_backend_test\.double"):
        capture(lambda: double(x))


def test_a_graph_object_captures_once(x):
    graph = capture(lambda: x + 1)
    with pytest.raises(RuntimeError, match="already owns a captured graph"):
        graph.capture_begin()


def test_a_reset_graph_cannot_be_replayed_but_captures_again(x):
    graph = capture(lambda: x.add_(1))
    graph.reset()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    with torch.cuda.graph(graph):
        x.add_(10)
    graph.replay()
    assert x.tolist() == [11, 10, 12]
