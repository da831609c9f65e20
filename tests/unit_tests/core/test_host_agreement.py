"""Ranks agree by messages between their hosts: threads stand for ranks, each with its own gloo group."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product

import pytest
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.host_agreement import HostAgreement, agreement_of_all_ranks

PATIENCE = timedelta(seconds=20)


def on_ranks(ranks, run, timeout=PATIENCE):
    """What ``run(agreement, rank)`` returns on each rank."""
    store = dist.HashStore()

    def of(rank):
        return run(HostAgreement(dist.ProcessGroupGloo(store, rank, ranks, PATIENCE), timeout), rank)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(of, range(ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_a_flag_of_any_rank_is_one_of_all(ranks):
    def run(agreement, rank):
        return [agreement.any([rank == asking]) for asking in (None, *range(ranks))]

    assert on_ranks(ranks, run) == [[(False,), *[(True,)] * ranks]] * ranks


def test_flags_are_told_apart():
    mine = list(product([False, True], repeat=3))
    all_of_them = tuple(tuple(mine[step][i] or mine[-step - 1][i] for i in range(3)) for step in range(8))

    def run(agreement, rank):
        return tuple(agreement.any(mine[step] if rank == 0 else mine[-step - 1]) for step in range(8))

    assert on_ranks(2, run) == [all_of_them] * 2


def test_as_many_flags_as_a_message_holds():
    flags = [False] * 62 + [True]
    assert on_ranks(2, lambda agreement, rank: agreement.any(flags if rank else [False] * 63)) == [tuple(flags)] * 2


def test_a_rank_that_is_late_is_waited_for_and_one_that_does_not_come_is_an_error():
    def run(agreement, rank):
        agreement.any([False])
        if rank == 0:
            return None
        with pytest.raises(RuntimeError, match=r"rank 0 did not answer.*raise --distributed-timeout-minutes"):
            agreement.any([False])
        return "said so"

    assert on_ranks(2, run, timedelta(seconds=1)) == [None, "said so"]


@pytest.fixture
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("of_hosts", [True, False])
@pytest.mark.usefixtures("_one_rank")
def test_hosts_agree_where_megatron_has_groups_of_hosts(of_hosts):
    assert agreement_of_all_ranks() is None  # before Megatron has any group
    timeout = timedelta(minutes=3)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=of_hosts, distributed_timeout_minutes=3)
    agreement = agreement_of_all_ranks()
    assert (agreement is not None) == of_hosts
    if agreement is not None:
        assert agreement._timeout == timeout
        assert agreement.any([True, False]) == (True, False)
