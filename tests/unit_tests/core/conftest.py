"""Provide the CPU backend for tests of ``megatron.core``."""

from collections.abc import Iterator

import pytest

pytest.importorskip("megatron.core")
import torch
from hypothesis import settings

from tests.support.ranks.on_cpu_backend import on_cpu_backend
from tests.support.ranks.rank_fixtures import cpu_backend_of_module, process_group

__all__ = ["cpu_backend_of_module", "process_group"]

# The duration of an example depends on the load of the machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="module")
def _installed_cpu_backend() -> Iterator[None]:
    with on_cpu_backend():
        yield


@pytest.fixture
def cpu_backend(_installed_cpu_backend: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a test on the CPU backend and a side stream, with a fixed seed and a new RNG tracker."""
    from megatron.core.tensor_parallel import random as tensor_parallel_random

    for name in ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"):
        monkeypatch.setattr(tensor_parallel_random, name, None)
    torch.manual_seed(1234)
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    assert not torch.cuda.is_current_stream_capturing()
