"""Every test here runs on the CPU backend, and leaves torch as it found it."""

import pytest
import torch

from megatron_fsdp_cuda_graphs.cpu_backend import install, installed, uninstall


@pytest.fixture(autouse=True, scope="module")
def _cpu_backend():
    if installed():
        yield
        return
    if torch.cuda.is_available():
        pytest.skip("a GPU is visible: the CPU backend needs CUDA_VISIBLE_DEVICES=''")
    install()
    yield
    uninstall()


@pytest.fixture(autouse=True)
def _side_stream():
    """Build and capture on a stream that is not the legacy default one, as a program with graphs has to."""
    torch.manual_seed(1234)
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    assert not torch.cuda.is_current_stream_capturing()
