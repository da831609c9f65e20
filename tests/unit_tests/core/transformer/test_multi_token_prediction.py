"""Test multi-token prediction: static scales and metrics, and packed sequences without host synchronization."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
    _roll_tensor_packed_seq,
)
from megatron_fsdp_cuda_graphs.overlay import upstream
from tests.support.layers.packed_attention import places_on_rank

MODULE = "megatron.core.transformer.multi_token_prediction"


@pytest.fixture
def scale():
    """Yield a getter of the loss-gradient scale, and restore the scale after the test."""
    with mock.patch.object(MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0)):
        yield lambda: MTPLossAutoScaler.main_loss_backward_scale


@pytest.mark.usefixtures("cpu_backend")
def test_scale_on_the_gpu_is_set_in_place(scale):
    MTPLossAutoScaler.set_loss_scale(torch.full((1,), 2.0, device="cuda"))
    first = scale()
    for other in (torch.full((1,), 3.0, device="cuda"), torch.tensor(3.0, device="cuda")):
        MTPLossAutoScaler.set_loss_scale(other)
        assert scale() is first
        assert first.tolist() == [3.0]


def test_scale_on_the_host_is_replaced(scale):
    first = scale()
    MTPLossAutoScaler.set_loss_scale(torch.tensor(2.0))
    assert (first.item(), scale().item()) == (1.0, 2.0)


def test_metrics_are_zeroed_in_place_and_keep_groups():
    tracker = {name: torch.ones(2) for name in ("loss_values", "correct_values", "total_values")}
    tracker["cumulative_total_values"] = torch.ones(2)
    with mock.patch.object(MTPLossLoggingHelper, "tracker", tracker | {"avg_group": "ranks", "reduce_group": None}):
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        now = MTPLossLoggingHelper.tracker
        assert all(now[name] is value for name, value in tracker.items())
        assert (now["avg_group"], now["reduce_group"]) == ("ranks", None)
    assert [value.tolist() for value in tracker.values()] == [[0.0] * 2] * 3 + [[1.0] * 2]


TOKENS = 9


@given(st.lists(st.integers(0, TOKENS), min_size=1, max_size=6).map(sorted), st.sampled_from([(), (2,), (3, 2)]))
def test_packed_sequences_roll_as_in_megatron_core(ends, leading):
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, *ends], dtype=torch.int32))
    tensor = torch.arange(1, 1 + TOKENS).expand(*leading, TOKENS).contiguous()
    theirs = upstream(MODULE)._roll_tensor_packed_seq(tensor, -1, -1, packed)
    for ours, expected in zip(_roll_tensor_packed_seq(tensor, -1, -1, packed), theirs, strict=True):
        assert torch.equal(ours, expected)
        assert ours.dtype == expected.dtype


@pytest.mark.usefixtures("cpu_backend")
def test_replay_rolls_the_sequences_of_its_inputs():
    offsets = torch.zeros(3, dtype=torch.int32, device="cuda")
    tensor = torch.arange(1, 5, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rolled, total = _roll_tensor_packed_seq(tensor, -1, -1, SimpleNamespace(cu_seqlens_q=offsets))
    for ends, expected in (([0, 4, 4], [2, 3, 4, 0]), ([0, 1, 4], [0, 3, 4, 0]), ([0, 2, 3], [2, 0, 0, 4])):
        offsets.copy_(torch.tensor(ends, dtype=torch.int32, device="cuda"))
        graph.replay()
        assert (rolled.tolist(), total.item()) == (expected, sum(expected))


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6).map(sorted), st.sampled_from([2, 3]), st.sampled_from([0, 1])
)
def test_ranks_roll_shared_sequences_as_whole_ones(ends, ranks, behind):
    offsets = torch.tensor([0, *ends], dtype=torch.int32) * 2 * ranks
    tokens = (ends[-1] + behind) * 2  # per rank; may extend past the last sequence
    packed = SimpleNamespace(cu_seqlens_q=offsets)
    whole = torch.arange(1, 1 + tokens * ranks).expand(2, -1).contiguous()
    expected, _ = _roll_tensor_packed_seq(whole, -1, -1, packed)
    # Adds a sequence for the tokens after the last one.
    covering = torch.cat((offsets, torch.tensor([tokens * ranks], dtype=torch.int32)))
    places = [places_on_rank(covering, tokens, rank, ranks) for rank in range(ranks)]

    def gather(parts, tensor, group):
        for part, place in zip(parts, places, strict=True):
            part.copy_(whole[:, place])

    for rank in range(ranks):
        group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        own = whole[:, places[rank]]
        with mock.patch.object(torch.distributed, "all_gather", gather):
            rolled, total = _roll_tensor_packed_seq(own, -1, -1, packed, group)
        assert torch.equal(rolled, expected[:, places[rank]])
        assert total == rolled.sum()
