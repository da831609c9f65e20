"""Test that TransformerEngine's Adam steps bit-identically with and without cached tensor lists."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.support.trainings.gpus import GPUS

if not GPUS:
    pytest.skip("needs a GPU and TransformerEngine", allow_module_level=True)

from transformer_engine.pytorch.optimizers import FusedAdam

from megatron.core.optimizer.local_shards import LocalShards

SHAPES = ((64, 33), (5,), (70000,), (2, 2))
STEPS = 5


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def build(mesh, dtype, **options):
    generator = torch.Generator("cuda").manual_seed(1)

    def shard(shape):
        values = torch.randn(shape, generator=generator, device="cuda").to(dtype)
        return DTensor.from_local(values, mesh, [Shard(0)])

    params = [torch.nn.Parameter(shard(shape)) for shape in SHAPES]
    for param in params:
        param.grad = shard(param.shape)
        param.grad.stays = True
    nowhere = torch.nn.Parameter(shard((2,)))  # no gradient, like a parameter without a local shard
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.5, "weight_decay": 0.0}, {"params": [nowhere]}]
    return FusedAdam(groups, lr=0.1, weight_decay=0.1, **options)


def tensors(optimizer):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [getattr(tensor, "_local_tensor", tensor) for tensor in (*params, *states)]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"adam_w_mode": False, "bias_correction": False}),
        (torch.bfloat16, {}),
    ],
)
def test_cached_steps_are_bit_identical(mesh, dtype, options):
    expected, optimizer = build(mesh, dtype, **options), build(mesh, dtype, **options)
    shards = None
    for step in range(STEPS):
        expected.step()
        if shards is None:
            optimizer.step()
            shards = LocalShards(optimizer)
        else:
            assert shards.current()
            with shards.in_place():
                looked_at = [len(group["params"]) for group in optimizer.param_groups]
                optimizer.step()
            assert looked_at == ([3, 1, 1] if step == 1 else [1, 1, 1])
        assert [group["step"] for group in optimizer.param_groups] == [step + 1] * 3
        for one, other in zip(tensors(optimizer), tensors(expected), strict=True):
            assert torch.equal(one, other)
        for group in expected.param_groups + optimizer.param_groups:
            group["lr"] *= 0.9


def test_states_in_low_precision_are_not_cached(mesh):
    optimizer = build(mesh, torch.float32, exp_avg_dtype=torch.bfloat16)
    optimizer.step()
    assert not LocalShards.eligible(optimizer, (FusedAdam,))
