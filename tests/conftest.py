"""Settings shared by all tests."""

import os
from pathlib import Path

import pytest

# For torch here and in child processes: tensors are small, and workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.path.is_relative_to(GPU_TESTS)]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run `make test-gpu`"))
