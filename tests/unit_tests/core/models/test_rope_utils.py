"""Test that context-parallel ranks split positional embeddings like megatron-core, without host tensors."""

import importlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

SIZE = 2


@pytest.fixture(scope="module")
def module():
    return importlib.import_module("megatron.core.models.common.embeddings.rope_utils")


def ranks():
    return [SimpleNamespace(size=lambda: SIZE, rank=lambda rank=rank: rank) for rank in range(SIZE)]


@pytest.mark.parametrize("seq_dim", [0, 1])
def test_each_rank_gets_its_chunks_as_in_megatron_core(module, seq_dim):
    whole = torch.rand(16, 8, 3)
    with (
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, **_: tensor),
        mock.patch.object(torch, "tensor", lambda values, **_: torch.as_tensor(values)),
    ):
        expected = [module._upstream.get_pos_emb_on_this_cp_rank(whole, seq_dim, rank) for rank in ranks()]
    for rank, pieces in zip(ranks(), expected, strict=True):
        assert torch.equal(module.get_pos_emb_on_this_cp_rank(whole, seq_dim, rank), pieces)
        with torch.device("meta"):  # as under capture, no tensor is made on the host
            assert module.get_pos_emb_on_this_cp_rank(whole.to("meta"), seq_dim, rank).shape == pieces.shape


def test_missing_group_is_an_error(module):
    with pytest.raises(ValueError, match="cp_group must be provided"):
        module.get_pos_emb_on_this_cp_rank(torch.rand(4, 1), 0, None)


def test_pieces_of_unequal_length_are_an_error(module):
    with pytest.raises(RuntimeError):
        module.get_pos_emb_on_this_cp_rank(torch.rand(6, 1), 0, ranks()[0])
