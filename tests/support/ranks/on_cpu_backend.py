"""Use the CPU backend in this process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron_fsdp_cuda_graphs.cpu_backend import install, installed


@contextmanager
def on_cpu_backend() -> Iterator[None]:
    """Context manager that installs the CPU backend, which stays installed."""
    if installed():
        yield
        return
    if torch.cuda.is_available():
        pytest.skip("a GPU is visible: the CPU backend needs CUDA_VISIBLE_DEVICES=''")
    install()
    gc.freeze()  # exclude imported objects from garbage collection during captures
    try:
        yield
    finally:
        gc.unfreeze()
