"""Test which tensors are on the device and which on the host."""

import threading

import pytest
import torch

FACTORIES = {
    "zeros": lambda d: torch.zeros(2, device=d),
    "tensor": lambda d: torch.tensor([1, 2], device=d),
    "arange": lambda d: torch.arange(3, device=d),
    "randn": lambda d: torch.randn(3, device=d),
    "normal": lambda d: torch.normal(0.0, 1.0, (3,), device=d),
    "full_like": lambda d: torch.full_like(torch.zeros(2), 3, device=d),
    "new_zeros": lambda d: torch.zeros(2).new_zeros(3, device=d),
    "to": lambda d: torch.zeros(2).to(d),
    "to with dtype": lambda d: torch.zeros(2).to(d, torch.int32, non_blocking=True),
    "to by keyword": lambda d: torch.zeros(2).to(device=d, dtype=torch.int32),
    "cuda": lambda d: torch.zeros(2).cuda(d),
    "module": lambda d: torch.nn.Linear(2, 2, device=d).weight,
    "moved module": lambda d: torch.nn.Linear(2, 2).cuda(d).weight,
    "emptied module": lambda d: torch.nn.Linear(2, 2, device="meta").to_empty(device=d).weight,
    "under a device": lambda d: torch.nn.Linear(2, 2, device=torch.device("cuda", 0)).weight,
}


@pytest.mark.parametrize("device", ["cuda:0", 0, torch.device("cuda", 0)], ids=str)
@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES.keys())
def test_factories_with_a_device_return_device_tensors(make, device):
    made = make(device)
    assert made.is_cuda
    assert made.device.type == "cpu"


@pytest.mark.parametrize(
    "make", [lambda: torch.zeros(3), lambda: torch.rand(3), lambda: torch.tensor([3]), lambda: torch.ones(3)[:1]]
)
def test_factories_without_a_device_return_host_tensors(make):
    assert not make().is_cuda


def test_replay_copies_to_pinned_memory():
    x, host = torch.ones(2, device="cuda"), torch.zeros(2).pin_memory()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        host.copy_(x * 2, non_blocking=True)
    assert host.is_pinned()
    graph.replay()
    assert host.tolist() == [2, 2]


def test_moves_between_host_and_device_copy():
    host = torch.zeros(2)
    device = host.cuda()
    assert device.cuda() is device
    device.add_(1)
    for copied in (device.cpu(), device.to("cpu")):
        assert not copied.is_cuda
        copied.add_(1)
    assert (host.tolist(), device.tolist()) == ([0, 0], [1, 1])


def test_threads_and_hooks_use_the_device():
    made = []
    thread = threading.Thread(target=lambda: made.append(torch.zeros(1, device="cuda")))
    thread.start()
    thread.join()
    x = torch.ones(1, device="cuda", requires_grad=True)
    x.register_hook(lambda grad: made.append(torch.zeros(1, device="cuda")))
    x.sum().backward()
    assert [t.is_cuda for t in made] == [True, True]
