"""agreement: threads stand for ranks, which share a store."""

import threading
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore, distributed_c10d

from megatron.core.transformer._cuda_graphs.errors import CaptureFailedError, CaptureInterruptedError
from megatron.core.transformer._cuda_graphs.te.agreement import Ballot, CaptureAgreement, Failure, Objection

from .stages import stage_of

LIMIT = 120  # seconds
SHORT = 1  # seconds, more than threads that start together are apart
OUT_OF_MEMORY = Failure(1, "layer 2 (Layer), forward", "OutOfMemoryError: none left")


A_FAULT = RuntimeError("a fault")


class Group:
    """What of a process group the store needs to know, as the rank has it whose thread this is."""

    def __init__(self, size, name="0", timeout=LIMIT):
        self._size, self.group_name, self._timeout = size, name, timedelta(seconds=timeout)

    def _get_backend(self, device):
        return SimpleNamespace(options=SimpleNamespace(_timeout=self._timeout))

    def size(self):
        return self._size

    def rank(self):
        return torch.distributed.get_rank()


@pytest.fixture(autouse=True)
def _store(monkeypatch):
    store = HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(torch.distributed, "get_rank", rank_of_this_thread)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: list(range(group.size())))
    monkeypatch.setattr(distributed_c10d, "_get_object_coll_device", lambda group: "cpu")


def rank_of_this_thread():
    name = threading.current_thread().name
    return int(name) if name.isdigit() else 0


def on_ranks(count, run):
    """What ``run(rank)`` returns or raises in a thread for each rank."""
    results: list = [None] * count

    def call(rank):
        try:
            results[rank] = run(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,), name=str(rank), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    return results


def join(agreed, where):
    """Begin what is captured at ``where``, with a collective."""
    agreed.begin(where)
    agreed.join()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_vote_of_all_passes_as_often_as_they_vote(size):
    def run(rank):
        ballot = Ballot(Group(size))
        return [ballot.vote() for _ in range(5)]

    assert on_ranks(size, run) == [[None] * 5] * size


@pytest.mark.parametrize("against", [None, Objection(1, "a reason")])
def test_votes_leave_no_keys_in_the_store(against):
    def run(rank):
        ballot = Ballot(Group(3))
        for number in range(10):
            ballot.vote(against if rank == 1 and number % 3 == 1 else None)

    store = distributed_c10d._get_default_store()
    on_ranks(3, run)
    before = store.num_keys()
    on_ranks(3, run)
    assert store.num_keys() == before + 1  # the last verdict of each capture


def test_no_rank_gets_ahead_of_another():
    order = []

    def run(rank):
        ballot = Ballot(Group(2))
        for number in range(20):
            order.append((number, rank))
            ballot.vote()

    on_ranks(2, run)
    assert [number for number, _ in order] == sorted(number for number, _ in order)


def test_a_failure_reaches_the_others_before_they_have_all_voted():
    def run(rank):
        if rank == 2:
            return None  # never votes
        return Ballot(Group(3)).vote(OUT_OF_MEMORY if rank == 1 else None)

    assert on_ranks(3, run) == [OUT_OF_MEMORY, OUT_OF_MEMORY, None]


def test_all_get_the_same_of_several_failures():
    def run(rank):
        return Ballot(Group(3)).vote(Failure(rank, "somewhere", "something"))

    first, *others = on_ranks(3, run)
    assert first.rank in range(3)
    assert others == [first, first]


def test_a_later_capture_has_votes_of_its_own():
    def run(rank):
        failed = Ballot(Group(2)).vote(OUT_OF_MEMORY if rank == 1 else None)
        return failed, Ballot(Group(2)).vote()

    assert on_ranks(2, run) == [(OUT_OF_MEMORY, None)] * 2


def test_a_rank_may_begin_a_later_capture_before_others_begin_the_first():
    failed = threading.Event()

    def run(rank):
        if rank == 1:
            failed.wait(LIMIT)
        first = Ballot(Group(2)).vote(OUT_OF_MEMORY if rank == 0 else None)
        second = Ballot(Group(2))
        failed.set()
        return first, second.vote()

    assert on_ranks(2, run) == [(OUT_OF_MEMORY, None)] * 2


def test_groups_vote_apart():
    def run(rank):
        return Ballot(Group(2, name=str(rank // 2))).vote(OUT_OF_MEMORY if rank == 1 else None)

    assert on_ranks(4, run) == [OUT_OF_MEMORY, OUT_OF_MEMORY, None, None]


def test_ranks_that_never_vote_are_named_after_the_time_limit_of_the_group():
    def run(rank):
        ballot = Ballot(Group(4, timeout=SHORT))
        ballot.vote()  # all are there
        return ballot.vote() if rank in (0, 2) else None

    first, _, third, _ = on_ranks(4, run)
    assert {type(error) for error in (first, third)} == {RuntimeError}
    assert str(first).startswith("rank 1 and 3 did not come to where rank 0 waited for it in a CUDA graph capture")
    assert ", for 0:00:01: " in str(first)
    assert "--distributed-timeout-minutes" in str(first)
    assert "where rank 2 waited" in str(third)


def test_all_learn_of_a_rank_that_is_gone_without_waiting_for_it_again():
    def run(rank):
        agreed = CaptureAgreement([Group(3, timeout=SHORT)], Group(3, "pipeline", timeout=LIMIT))
        agreed.begin("layer 1", "forward")
        if rank == 2:
            return None
        try:
            agreed.join()
        except RuntimeError as error:
            return str(agreed.failed(error))

    start = time.monotonic()
    first, second, _ = on_ranks(3, run)
    assert time.monotonic() - start < LIMIT
    for said in (first, second):
        assert ", layer 1, forward: RuntimeError: rank 2 did not come" in said


def test_a_store_that_is_gone_fails_the_capture_at_once(monkeypatch):
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("localhost", server.port, is_master=False, wait_for_workers=False)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    agreed = CaptureAgreement([Group(2)], Group(2, "pipeline"))
    del server
    start = time.monotonic()
    with pytest.raises(
        RuntimeError, match="the store over which ranks agree on a CUDA graph capture is gone"
    ) as raised:
        agreed.join()
    assert "the store over which ranks agree" in str(agreed.failed(raised.value))
    assert time.monotonic() - start < LIMIT


def test_ranks_that_cannot_communicate_vote_alone(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "fake")
    assert Ballot(Group(4)).vote() is None
    assert Ballot(Group(4)).vote(OUT_OF_MEMORY) == OUT_OF_MEMORY


class TestCaptures:
    """Four ranks in two pipeline stages, of one and two layers."""

    def capture(self, fails_on=None, error=A_FAULT):
        def run(rank):
            stage = rank // 2
            agreed = CaptureAgreement([Group(2, f"stage {stage}")], Group(2, f"pipeline {rank % 2}"))
            try:
                join(agreed, "before the first layer")
                for layer in range(stage + 1):
                    join(agreed, f"layer {layer}, forward")
                    if (rank, layer) == fails_on:
                        raise error
                agreed.finish()
            except BaseException as raised:
                raise agreed.failed(raised) from raised

        return on_ranks(4, run)

    def test_succeed_together(self):
        assert self.capture() == [None] * 4

    @pytest.mark.parametrize("fails_on", [(0, 0), (1, 0), (2, 0), (3, 1)])
    def test_fail_together_and_say_on_which_rank_and_in_which_layer(self, fails_on):
        errors = self.capture(fails_on)
        assert {type(error) for error in errors} == {CaptureFailedError}
        rank, layer = fails_on
        expected = f"CUDA graph capture failed on rank {rank}, layer {layer}, forward: RuntimeError: a fault"
        assert {str(error) for error in errors} == {expected}
        assert str(errors[rank].__cause__) == "a fault"

    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(1)], ids=repr)
    def test_are_interrupted_together_in_all_stages(self, interrupt):
        errors = self.capture((3, 1), interrupt)
        assert {type(error) for error in errors} == {CaptureInterruptedError}
        shown = f"{type(interrupt).__name__}: {interrupt}".removesuffix(": ")
        expected = f"CUDA graph capture was interrupted on rank 3, layer 1, forward: {shown}"
        assert {str(error) for error in errors} == {expected}

    def test_a_capture_inside_another_that_failed_is_a_cause_like_any_other(self):
        errors = self.capture((0, 0), CaptureFailedError("of another helper"))
        assert {str(error) for error in errors} == {
            "CUDA graph capture failed on rank 0, layer 0, forward: CaptureFailedError: of another helper"
        }


def crossing_groups(rank):
    """Two groups of two, of the process groups of a caller that has none of all four ranks."""
    tp, dp_cp, pp = Group(2, f"tp {rank // 2}"), Group(2, f"dp {rank % 2}"), Group(1, f"pp {rank}")
    groups: Any = SimpleNamespace(tp=tp, dp_cp=dp_cp, pp=pp)
    return replace(stage_of(), groups=groups).agreement(with_other_stages=True)


class TestCrossingGroups:
    def capture(self, fails_on=None):
        def run(rank):
            agreed = crossing_groups(rank)
            try:
                for layer in range(3):
                    join(agreed, f"layer {layer}")
                    if (rank, layer) == fails_on:
                        raise A_FAULT
                agreed.finish()
            except BaseException as raised:
                raise agreed.failed(raised) from raised

        return on_ranks(4, run)

    def test_succeed_together(self):
        assert self.capture() == [None] * 4

    @pytest.mark.parametrize("rank", range(4))
    def test_fail_together_though_no_group_has_all_ranks(self, rank):
        errors = self.capture((rank, 1))
        expected = f"CUDA graph capture failed on rank {rank}, layer 1: RuntimeError: a fault"
        assert [str(error) for error in errors] == [expected] * 4


class TestObjections:
    """Four ranks, some of which cannot capture what was asked for; one may fail before it could say so."""

    def capture(self, objecting, fails=None, crossing=True):
        def run(rank):
            agreed = crossing_groups(rank) if crossing else CaptureAgreement([Group(4)], None)
            try:
                if rank == fails:
                    raise A_FAULT
                reason = agreed.objection(f"reason {rank}" if rank in objecting else "")
                join(agreed, "layer 0")
                agreed.finish()
            except Exception as raised:
                raise agreed.failed(raised) from raised
            return reason

        return on_ranks(4, run)

    @pytest.mark.parametrize("crossing", [True, False])
    def test_without_one_nobody_has_a_reason(self, crossing):
        assert self.capture((), crossing=crossing) == [""] * 4

    @pytest.mark.parametrize("crossing", [True, False])
    @pytest.mark.parametrize("rank", range(4))
    def test_one_is_that_of_all_ranks_and_the_capture_goes_on(self, rank, crossing):
        reasons = self.capture((rank,), crossing=crossing)
        assert reasons[rank] == f"reason {rank}"
        assert {*reasons} == {f"reason {rank}", f"reason {rank} (on rank {rank})"}

    @pytest.mark.parametrize("fails", [None, 3])
    def test_one_is_that_of_other_pipeline_stages_too(self, fails):
        def run(rank):
            stage, place = divmod(rank, 2)
            agreed = CaptureAgreement([Group(2, f"stage {stage}")], Group(2, f"pipeline {place}"))
            try:
                if rank == fails:
                    raise A_FAULT
                reasons = [agreed.objection("reason 0" if rank == 0 else ""), agreed.objection("")]
                agreed.finish()
            except Exception as raised:
                raise agreed.failed(raised) from raised
            return reasons

        results = on_ranks(4, run)
        if fails is None:
            assert results == [["reason 0", ""]] + [["reason 0 (on rank 0)", ""]] * 3
        else:
            assert {str(error) for error in results} == {
                "CUDA graph capture failed on rank 3, before the first layer: RuntimeError: a fault"
            }

    def test_each_rank_that_has_one_gives_its_own(self):
        assert self.capture(range(4)) == [f"reason {rank}" for rank in range(4)]

    @pytest.mark.parametrize("crossing", [True, False])
    @pytest.mark.parametrize("fails", range(1, 4))
    def test_a_rank_that_fails_meanwhile_fails_the_capture_on_all(self, fails, crossing):
        errors = self.capture((0,), fails, crossing)
        expected = f"CUDA graph capture failed on rank {fails}, before the first layer: RuntimeError: a fault"
        assert [str(error) for error in errors] == [expected] * 4

    def test_a_failure_that_comes_after_one_is_not_lost(self):
        objected = threading.Event()

        def run(rank):
            ballot = Ballot(Group(2))
            if rank == 0:
                first = ballot.vote(Objection(0, "a reason"))
                objected.set()
                return first, ballot.vote()
            objected.wait(LIMIT)
            return ballot.vote(OUT_OF_MEMORY)

        assert on_ranks(2, run) == [(Objection(0, "a reason"), OUT_OF_MEMORY), OUT_OF_MEMORY]


def test_an_interrupt_outranks_a_failure_on_another_rank():
    failed = threading.Event()
    interrupt = Failure(1, "layer 3 (Layer), forward", "KeyboardInterrupt", interrupted=True)

    def run(rank):
        ballot = Ballot(Group(2))
        if rank == 0:
            first = ballot.vote(OUT_OF_MEMORY)
            failed.set()
            return first
        failed.wait(LIMIT)
        return ballot.vote(interrupt)

    assert on_ranks(2, run) == [OUT_OF_MEMORY, interrupt]


class Interrupted:
    """A store that Ctrl-C interrupts once, at one of its calls: before it takes effect, or right after."""

    def __init__(self, store, at, before):
        self._store, self._left, self._before = store, at, before

    def __getattr__(self, name):
        def call(*args):
            self._left -= 1
            if self._left == -1 and self._before:
                raise KeyboardInterrupt
            result = getattr(self._store, name)(*args)
            if self._left == -1:
                raise KeyboardInterrupt
            return result

        return call


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("at", range(10))  # a vote makes four or five calls
@pytest.mark.parametrize(("ranks", "ballot"), [(2, 0), (4, 0), (4, 1)], ids=["one group", "first", "second"])
def test_ctrl_c_within_a_vote_leaves_no_rank_waiting(ranks, ballot, at, before):
    def run(rank):
        agreed = CaptureAgreement([Group(2)], None) if ranks == 2 else crossing_groups(rank)
        interrupted = agreed._stage[ballot]
        if rank == 1:
            interrupted._store = Interrupted(interrupted._store, at, before)
        try:
            for layer in range(5):
                join(agreed, f"layer {layer}")
        except BaseException as raised:
            return agreed.failed(raised)
        return None

    start = time.monotonic()
    errors = on_ranks(ranks, run)
    assert time.monotonic() - start < LIMIT
    assert {type(error) for error in errors} == {CaptureInterruptedError}
    said = [str(error) for error in errors]
    assert all("was interrupted on rank 1, " in text and text.endswith(": KeyboardInterrupt") for text in said), said
