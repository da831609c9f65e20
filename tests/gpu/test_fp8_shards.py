"""Test that FP8 casts of shards are bit-identical with and without transposes."""

import pytest
import torch
import torch.distributed as dist

from tests.support.trainings.gpus import GPUS

if not GPUS:
    pytest.skip("needs a GPU and TransformerEngine", allow_module_level=True)

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

from megatron.core.distributed.fsdp.src.megatron_fsdp import mixed_precision

SHAPE = (256, 384)  # shape of a weight; a rank holds the last two thirds
START = 256 * 128


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def cast(quantize, recipe, group):
    """Return the FP8 bytes of a weight's shard (its elements from ``START`` on), and the weight's scales and amax."""
    torch.manual_seed(1)
    with te.quantized_model_init(recipe=recipe):
        weight = te.Linear(SHAPE[1], SHAPE[0], bias=False, params_dtype=torch.bfloat16).weight
    main = torch.randn(weight.numel() - START, device="cuda")
    shard = torch.empty(main.numel(), dtype=torch.uint8, device="cuda")
    quantize([weight], [main], [START], group, [(shard, None)])
    quantizer = weight._get_quantizer()
    left = [weight._scale_inv, *(getattr(quantizer, name, None) for name in ("scale", "amax"))]
    return shard, [tensor.clone() for tensor in left if tensor is not None]


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling()], ids=["delayed", "tensorwise"])
def test_bytes_and_scales_are_equal(recipe, group):
    expected, scales = cast(mixed_precision._upstream.fp8_quantize, recipe, group)
    found, found_scales = cast(mixed_precision.fp8_quantize, recipe, group)
    assert torch.equal(found, expected) and expected.any()
    assert len(scales) == len(found_scales) and all(map(torch.equal, found_scales, scales))
