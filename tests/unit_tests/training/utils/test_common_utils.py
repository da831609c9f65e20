"""Test that step statistics are reduced without synchronizing if the model-parallel group has one rank."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from tests.support.ranks.on_cpu_backend import on_cpu_backend

OTHERS = SimpleNamespace(size=lambda: 2)


@pytest.fixture(scope="module")
def alone():
    """Yield a process group of one rank."""
    with on_cpu_backend():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        yield dist.group.WORLD
        dist.destroy_process_group()


@pytest.fixture
def utils():
    from megatron.training.utils import common_utils

    return common_utils


@pytest.fixture
def upstream():
    from megatron_fsdp_cuda_graphs.overlay import upstream

    return upstream("megatron.training.utils.common_utils")


@pytest.mark.parametrize("stat", [0.1, 3, float("inf"), None])
def test_numbers_equal_megatron_core(alone, utils, upstream, stat):
    expected = upstream.reduce_max_stat_across_model_parallel_group(stat, alone)
    result = utils.reduce_max_stat_across_model_parallel_group(stat, alone)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensors_have_the_value_and_format_of_floats(alone, utils, upstream, dtype, shape):
    stat = torch.full(shape, 7, dtype=dtype, device="cuda") / (3 if dtype.is_floating_point else 1)
    expected = upstream.reduce_max_stat_across_model_parallel_group(stat, alone)
    result = utils.reduce_max_stat_across_model_parallel_group(stat, alone)
    assert float(result) == expected
    assert f"{result:.3f} {result:.6E}" == f"{expected:.3f} {expected:.6E}"


def test_result_is_a_copy(alone, utils):
    stat = torch.ones(1, device="cuda")
    result = utils.reduce_max_stat_across_model_parallel_group(stat, alone)
    stat.fill_(2.0)
    assert float(result) == 1.0


def test_one_rank_does_not_synchronize(alone, utils):
    """Check the reductions in a capture, in which synchronizing raises an error."""
    stat = torch.ones(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
        utils.reduce_max_stat_across_model_parallel_group(stat, alone)
        utils.reduce_max_stat_across_model_parallel_group(0.5, alone)
        utils.logical_and_across_model_parallel_group(True, alone)


@pytest.mark.parametrize("group", [OTHERS, None])
@pytest.mark.parametrize(
    "name", ["logical_and_across_model_parallel_group", "reduce_max_stat_across_model_parallel_group"]
)
def test_several_ranks_reduce_as_in_megatron_core(utils, upstream, name, group):
    with (
        mock.patch.object(utils.parallel_state, "get_model_parallel_group", return_value=OTHERS),
        mock.patch.object(upstream, name, return_value="reduced") as own,
    ):
        assert getattr(utils, name)(3.0, group) == "reduced"
    own.assert_called_once_with(3.0, group)
