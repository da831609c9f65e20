"""Test that checks of DTensors do not communicate across pipeline stages."""

import pytest

pytest.importorskip("megatron.core")

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import _api

SHAPE = 4, 6


@pytest.fixture
def shard(ranks, monkeypatch):
    """Return a function that creates a DTensor whose local shard has the given number of rows."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import make_fsdp_dtensor
    from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import FSDPDistributedIndex

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp_cp", "tp"))
    index = FSDPDistributedIndex(mesh, dp_shard_dim="dp_cp", tp_dim="tp")
    param = torch.nn.Parameter(torch.zeros(*SHAPE, device="cuda"))
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, 0, 1

    def all_ranks(*args, **kwargs):
        raise AssertionError("compared all ranks of the job, including other stages")

    monkeypatch.setattr(_api, "check_tensor_meta", all_ranks)
    return lambda rows: make_fsdp_dtensor(torch.zeros(rows * SHAPE[1]), param, index, run_check=True)


def test_dtensors_compare_only_ranks_that_share_them(shard):
    tensor = shard(2)
    assert tensor.shape == (8, 6)  # over both tensor-parallel ranks
    assert tensor.to_local().shape == (2, 6)


def test_bounds_of_shards_are_checked(shard):
    with pytest.raises(AssertionError, match="chunk metadata is invalid"):
        shard(9)
