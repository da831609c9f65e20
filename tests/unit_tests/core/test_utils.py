"""Test that a tensor-parallel group of one rank gets its batch without broadcasts."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core import utils

ALONE: dict[str, Any] = {
    "has_cu_seqlens": False,
    "is_hybrid_cp": False,
    "create_attention_mask_in_dataloader": True,
    "broadcast_src_rank": 0,
    "cp_size": 1,
    "tp_rank": 0,
    "micro_batch_size": 2,
    "seq_length": 8,
    "mtp_on_this_rank": False,
}
STAGES: list[dict[str, Any]] = [
    {},
    {"pipeline_model_parallel_size": 2, "is_pipeline_first_stage": True},
    {"pipeline_model_parallel_size": 2, "is_pipeline_last_stage": True},
    {"pipeline_model_parallel_size": 2, "is_pipeline_last_stage": True, "mtp_on_this_rank": True},
    {"pipeline_model_parallel_size": 4},
    {"has_cu_seqlens": True, "pipeline_model_parallel_size": 4},
    {"has_cu_seqlens": True},
    {"has_cu_seqlens": True, "is_hybrid_cp": True},
]


def a_batch():
    tokens = torch.arange(16).view(2, 8)
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": torch.ones(2, 8),
        "position_ids": tokens % 8,
        "attention_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool),
        "cu_seqlens": torch.tensor([[0, 4, 8]], dtype=torch.int32),
        "max_seqlen": torch.tensor([4], dtype=torch.int32),
        "local_cp_size": torch.tensor([1], dtype=torch.int32),
    }


@pytest.fixture
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with mock.patch("torch.cuda.current_device", return_value="cpu"):
        yield
    dist.destroy_process_group()


@pytest.mark.parametrize("stage", STAGES, ids=str)
@pytest.mark.usefixtures("_one_rank")
def test_batch_equals_megatron_core(stage):
    options = ALONE | stage | {"broadcast_group": dist.group.WORLD}
    expected = utils._upstream.get_batch_on_this_tp_rank(a_batch(), **options)
    found = utils.get_batch_on_this_tp_rank(a_batch(), **options)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] is None) == (tensor is None)
        assert tensor is None or torch.equal(found[name], tensor)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.usefixtures("_one_rank")
def test_one_rank_skips_the_broadcasts(documents):
    batch, options = a_batch(), ALONE | {"has_cu_seqlens": documents}
    with mock.patch.object(dist, "broadcast", side_effect=AssertionError):
        assert utils.get_batch_on_this_tp_rank(batch, **options, broadcast_group=dist.group.WORLD) is batch


@pytest.mark.parametrize("group", [None, mock.Mock(spec=dist.ProcessGroup, size=lambda: 2)], ids=["world", "two ranks"])
def test_several_ranks_broadcast(group):
    with mock.patch.object(dist, "broadcast") as broadcast:
        utils.get_batch_on_this_tp_rank(a_batch(), **ALONE, broadcast_group=group)
    assert broadcast.call_count == 5
