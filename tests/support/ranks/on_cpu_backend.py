"""The CPU backend for tests in this process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron_fsdp_cuda_graphs.cpu_backend import install, installed, uninstall


@contextmanager
def on_cpu_backend() -> Iterator[None]:
    """Install the CPU backend, and leave torch as it was. A process that had it already keeps it."""
    if installed():
        yield
        return
    if torch.cuda.is_available():
        pytest.skip("a GPU is visible: the CPU backend needs CUDA_VISIBLE_DEVICES=''")
    install()
    gc.freeze()  # every capture collects garbage: it need not walk through all imported modules each time
    try:
        yield
    finally:
        gc.unfreeze()
        uninstall()
