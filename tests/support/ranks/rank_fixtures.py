"""Fixtures of tests that run on the CPU backend, as rank 0 of four ranks whose collectives move nothing.

What Megatron-FSDP registers, allocates and releases does not depend on what is communicated. Where values count, a test
runs as one rank.
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
    """The CPU backend, while a module's tests run."""
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
    gc.freeze()  # building a model collects garbage: spare it what the imports left
    yield instances
    gc.unfreeze()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(cpu_backend_of_module):
    """Four ranks that shard together."""
    with _four_ranks(1) as instances:
        yield instances


@pytest.fixture(scope="module")
def hybrid_ranks(cpu_backend_of_module):
    """Four ranks, two groups of two that shard."""
    with _four_ranks(2) as instances:
        yield instances


@pytest.fixture
def instances_of_one_rank(cpu_backend_of_module):
    """Four ranks, none of which shards with another."""
    with _four_ranks(4) as instances:
        yield instances


@pytest.fixture
def four_ranks(cpu_backend_of_module):
    """Makes four ranks with so many instances, of which this is the given one, in the given parallel groups."""
    with ExitStack() as stack:
        yield lambda *args, **groups: stack.enter_context(_four_ranks(*args, **groups))


@pytest.fixture(scope="module")
def process_group(cpu_backend_of_module):
    """A process group of this process alone, without Megatron's groups."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_rank(process_group):
    """This process alone, with collectives that communicate."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    yield
    parallel_state.destroy_model_parallel()


@pytest.fixture
def side_stream(cpu_backend_of_module):
    """The current stream is not the legacy default one, as in a program that captures."""
    gc.collect()
    gc.freeze()  # captures collect garbage, and building a model does: spare them what is there
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
