"""Settings that every test shares."""

import os
from pathlib import Path

import pytest

# Read when torch is imported, here and in processes that tests start. Tensors are small, and threads of several workers
# on the same cores wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.path.is_relative_to(GPU_TESTS)]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU is visible; `make test-gpu` runs these where there is one"))
