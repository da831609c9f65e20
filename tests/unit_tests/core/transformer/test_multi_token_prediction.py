"""Multi-token prediction: what graphs of the whole model read and add to, and packed sequences without the host."""

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
    """The scale of the losses' gradients, which is another one after the test."""
    with mock.patch.object(MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0)):
        yield lambda: MTPLossAutoScaler.main_loss_backward_scale


@pytest.mark.usefixtures("cpu_backend")
def test_the_scale_on_the_device_is_set_in_place(scale):
    MTPLossAutoScaler.set_loss_scale(torch.full((1,), 2.0, device="cuda"))
    first = scale()
    for other in (torch.full((1,), 3.0, device="cuda"), torch.tensor(3.0, device="cuda")):
        MTPLossAutoScaler.set_loss_scale(other)
        assert scale() is first
        assert first.tolist() == [3.0]


@pytest.mark.usefixtures("cpu_backend")
def test_the_first_scale_stays_its_givers(scale):
    given = torch.full((1,), 2.0, device="cuda")
    MTPLossAutoScaler.set_loss_scale(given)
    MTPLossAutoScaler.set_loss_scale(torch.full((1,), 3.0, device="cuda"))
    assert given.tolist() == [2.0]


def test_a_scale_on_the_host_is_replaced(scale):
    first = scale()
    MTPLossAutoScaler.set_loss_scale(torch.tensor(2.0))
    assert (first.item(), scale().item()) == (1.0, 2.0)


def test_gradients_of_the_losses_are_multiplied_by_the_scale(scale):
    hidden, losses = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    MTPLossAutoScaler.set_loss_scale(torch.full((1,), 2.0))
    MTPLossAutoScaler.apply(hidden, losses).backward(torch.full((2,), 5.0))
    assert hidden.grad is not None and losses.grad is not None
    assert (hidden.grad.tolist(), losses.grad.tolist()) == ([5.0] * 2, [2.0] * 3)


def test_metrics_are_cleared_in_place_and_keep_their_groups():
    tracker = {name: torch.ones(2) for name in ("loss_values", "correct_values", "total_values")}
    tracker["cumulative_total_values"] = torch.ones(2)
    with mock.patch.object(MTPLossLoggingHelper, "tracker", tracker | {"avg_group": "ranks", "reduce_group": None}):
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        now = MTPLossLoggingHelper.tracker
        assert all(now[name] is value for name, value in tracker.items())
        assert (now["avg_group"], now["reduce_group"]) == ("ranks", None)
    assert [value.tolist() for value in tracker.values()] == [[0.0] * 2] * 3 + [[1.0] * 2]


def test_there_may_be_no_metrics_yet():
    with mock.patch.object(MTPLossLoggingHelper, "tracker", {}):
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        assert MTPLossLoggingHelper.tracker == {}


TOKENS = 9


@given(st.lists(st.integers(0, TOKENS), min_size=1, max_size=6).map(sorted), st.sampled_from([(), (2,), (3, 2)]))
def test_packed_sequences_are_rolled_as_megatron_cores(ends, leading):
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, *ends], dtype=torch.int32))
    tensor = torch.arange(1, 1 + TOKENS).expand(*leading, TOKENS).contiguous()
    theirs = upstream(MODULE)._roll_tensor_packed_seq(tensor, -1, -1, packed)
    for ours, expected in zip(_roll_tensor_packed_seq(tensor, -1, -1, packed), theirs, strict=True):
        assert torch.equal(ours, expected)
        assert ours.dtype == expected.dtype


@pytest.mark.usefixtures("cpu_backend")
def test_a_graph_rolls_the_packed_sequences_of_each_replay():
    offsets = torch.zeros(3, dtype=torch.int32, device="cuda")
    tensor = torch.arange(1, 5, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rolled, total = _roll_tensor_packed_seq(tensor, -1, -1, SimpleNamespace(cu_seqlens_q=offsets))
    for ends, expected in (([0, 4, 4], [2, 3, 4, 0]), ([0, 1, 4], [0, 3, 4, 0]), ([0, 2, 3], [2, 0, 0, 4])):
        offsets.copy_(torch.tensor(ends, dtype=torch.int32, device="cuda"))
        graph.replay()
        assert (rolled.tolist(), total.item()) == (expected, sum(expected))


def test_other_rolls_are_megatron_cores():
    with mock.patch.object(upstream(MODULE), "_roll_tensor_packed_seq", return_value="theirs") as theirs:
        assert _roll_tensor_packed_seq(torch.zeros(4), 1, -1, "packed") == "theirs"
    assert theirs.call_count == 1


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6).map(sorted), st.sampled_from([2, 3]), st.sampled_from([0, 1])
)
def test_packed_sequences_that_ranks_share_are_rolled_as_whole_ones(ends, ranks, behind):
    offsets = torch.tensor([0, *ends], dtype=torch.int32) * 2 * ranks
    tokens = (ends[-1] + behind) * 2  # of a rank, some perhaps behind the last sequence
    packed = SimpleNamespace(cu_seqlens_q=offsets)
    whole = torch.arange(1, 1 + tokens * ranks).expand(2, -1).contiguous()
    expected, _ = _roll_tensor_packed_seq(whole, -1, -1, packed)
    covering = torch.cat((offsets, torch.tensor([tokens * ranks], dtype=torch.int32)))  # one more sequence
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
