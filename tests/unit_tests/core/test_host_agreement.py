"""Test that ranks reach agreement through host messages. Each rank is a thread with its own gloo group."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from threading import Barrier, Event
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core import parallel_state
from megatron.core.host_agreement import HostAgreement, agreement_of_all_ranks

PATIENCE = timedelta(minutes=2)  # longer than the delay of a rank on a busy host
SHORT = timedelta(seconds=2)


def on_ranks(ranks, run):
    """Return the result of ``run(agreement, rank, group)`` on each rank."""
    store = dist.HashStore()

    def of(rank):
        group = mock.Mock(group_name="0", size=lambda: ranks, rank=lambda: rank)
        group._get_backend().options._timeout = PATIENCE
        return run(HostAgreement(group), rank, group)

    with (
        mock.patch.object(distributed_c10d, "_get_default_store", return_value=store),
        mock.patch.object(distributed_c10d, "_get_object_coll_device", return_value="cpu"),
        mock.patch.object(dist, "get_process_group_ranks", return_value=list(range(ranks))),
        mock.patch.object(dist, "get_backend", return_value="nccl"),
        ThreadPoolExecutor(ranks) as threads,
    ):
        return list(threads.map(of, range(ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 7])
@pytest.mark.parametrize("expecting", [0, 1, 2], ids=["no rank expects", "rank 0 expects", "all ranks expect"])
def test_any_is_true_on_all_ranks_if_true_on_one(ranks, expecting):
    def run(agreement, rank, group):
        agreed = []
        for asking in (None, *range(ranks)):
            if expecting == 2 or (expecting == 1 and rank == 0):
                agreement.expect()
                agreement.expect()  # a step that failed before ranks agreed, and the next one
            agreed.append(agreement.any([rank == asking]))
        return agreed

    assert on_ranks(ranks, run) == [[(False,), *[(True,)] * ranks]] * ranks


def test_several_flags_are_independent():
    mine = list(product([False, True], repeat=3))
    all_of_them = tuple(tuple(mine[step][i] or mine[-step - 1][i] for i in range(3)) for step in range(8))

    def run(agreement, rank, group):
        return tuple(agreement.any(mine[step] if rank == 0 else mine[-step - 1]) for step in range(8))

    assert on_ranks(2, run) == [all_of_them] * 2


def test_slow_rank_is_awaited():
    def run(agreement, rank, group):
        time.sleep(0.3 * rank)
        return agreement.any([rank == 1])

    assert on_ranks(2, run) == [(True,)] * 2


def test_expected_message_arrives_before_any():
    expected = Barrier(2)

    def run(agreement, rank, group):
        agreement.expect()
        expected.wait()
        if rank == 0:
            ((heard, _),) = agreement._expected.values()
            end = time.monotonic() + PATIENCE.total_seconds()
            while not heard.item() and time.monotonic() < end:
                time.sleep(0.001)
            assert heard.item()
        return agreement.any([rank == 1])

    assert on_ranks(2, run) == [(True,)] * 2


def test_timeout_names_the_silent_rank():
    begun, over = Barrier(2), Barrier(3)  # ranks 0 and 2 begin together; rank 1 exits after both have waited for it

    def run(agreement, rank, group):
        agreement.any([False])
        group._get_backend().options._timeout = SHORT  # as update_pg_timeout does after the first step
        try:
            if rank == 1:
                return None
            begun.wait(PATIENCE.total_seconds())
            start = time.monotonic()
            with pytest.raises(RuntimeError, match=r"rank 1 exited, or did not answer within 0:00:02, "):
                agreement.any([False])
            return time.monotonic() - start >= SHORT.total_seconds()
        finally:
            over.wait(PATIENCE.total_seconds())

    assert on_ranks(3, run) == [True, None, True]


def test_dead_rank_is_named_at_once():
    gone = Event()

    def run(agreement, rank, group):
        agreement.any([False])
        if rank == 0:
            gone.set()  # returning destroys its group
            return None
        gone.wait(PATIENCE.total_seconds())
        time.sleep(0.3)  # until its socket is closed
        start = time.monotonic()
        agreement.expect()
        with pytest.raises(RuntimeError, match="rank 0 exited, or did not answer"):
            agreement.any([False])
        return time.monotonic() - start < PATIENCE.total_seconds() / 2

    assert on_ranks(2, run) == [None, True]


@pytest.fixture
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_all_ranks_agree_unless_gloo_groups_are_disabled():
    assert agreement_of_all_ranks() is None  # before Megatron has any group
    parallel_state.initialize_model_parallel()
    agreement = agreement_of_all_ranks()
    assert agreement is not None
    assert agreement_of_all_ranks() is agreement
    assert agreement.any([True, False]) == (True, False)
    with mock.patch.dict("sys.modules", {"nvidia_resiliency_ext.inprocess": mock.Mock()}):
        assert agreement_of_all_ranks() is None
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    assert agreement_of_all_ranks() is None
