"""Set the number of threads, skip GPU tests without a GPU, and mark sampled tests."""

import os
import zlib
from pathlib import Path

import pytest

# Read by torch here and in child processes: tensors are small, and workers share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

GPU_TESTS = Path(__file__).parent / "gpu"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _sample(items)
    on_gpu = [item for item in items if item.path.is_relative_to(GPU_TESTS)]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run `make test-gpu`"))


def _sample(items: list[pytest.Item]) -> None:
    """Mark all parameter sets of each ``sampled`` test ``long`` except one, selected by a hash of the test's name."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("long"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        kept = zlib.crc32(name.encode()) % len(cases)
        for case in cases[:kept] + cases[kept + 1 :]:
            case.add_marker(pytest.mark.long)
