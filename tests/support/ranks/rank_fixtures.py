"""Make this process rank 0 of four on the CPU backend, with collectives that move no data.

Megatron-FSDP's hooks, allocations and releases do not depend on the data. Tests that compare values use one rank.
"""

import gc
from contextlib import ExitStack, contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.ranks.on_cpu_backend import on_cpu_backend


@pytest.fixture(scope="module")
def cpu_backend_of_module():
    """Install the CPU backend for the tests of a module."""
    with on_cpu_backend():
        yield


@contextmanager
def _four_ranks(instances: int, rank: int = 0, **groups: int):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    parallel_state.initialize_model_parallel(
        num_distributed_optimizer_instances=instances, create_gloo_process_groups=False, **groups
    )
    model_parallel_cuda_manual_seed(1234)
    gc.freeze()  # exclude imported objects from garbage collection during model building
    yield instances
    gc.unfreeze()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(cpu_backend_of_module):
    """Set up four ranks in one sharding group, without HSDP."""
    with _four_ranks(1) as instances:
        yield instances


@pytest.fixture(scope="module")
def hybrid_ranks(cpu_backend_of_module):
    """Set up two HSDP replicas of two ranks each."""
    with _four_ranks(2) as instances:
        yield instances


@pytest.fixture
def instances_of_one_rank(cpu_backend_of_module):
    """Set up four HSDP replicas of one rank each."""
    with _four_ranks(4) as instances:
        yield instances


@pytest.fixture
def four_ranks(cpu_backend_of_module):
    """Return a function that sets up four ranks for the test; its arguments are those of ``_four_ranks``."""
    with ExitStack() as stack:
        yield lambda *args, **groups: stack.enter_context(_four_ranks(*args, **groups))


@pytest.fixture(scope="module")
def process_group(cpu_backend_of_module):
    """Provide a process group of one rank, without Megatron's groups."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_rank(process_group):
    """Set up Megatron's process groups for one rank with real collectives."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    yield
    parallel_state.destroy_model_parallel()


@pytest.fixture
def side_stream(cpu_backend_of_module):
    """Run the test on a side stream, as programs with graphs do."""
    gc.collect()
    gc.freeze()  # exclude live objects from garbage collection during captures and model building
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
