"""Test that ranks agree on a capture. Each rank is a thread; all share a store."""

import re
import threading
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, distributed_c10d

from megatron.core.transformer._cuda_graphs.agreement import (
    LAUNCHING,
    Ballot,
    CaptureAgreement,
    Failure,
    _before_each_collective,
)
from megatron.core.transformer._cuda_graphs.errors import CaptureFailedError, CaptureInterruptedError
from tests.unit_tests.core.distributed.captured_training import captured, graphed

LIMIT = 10  # seconds
SHORT = 1  # seconds, longer than the skew between threads
LAYERS = 5
A_FAULT = RuntimeError("a fault")


class Group:
    """Stand-in for a process group, as seen by its member ``rank`` (default: the rank of the current thread)."""

    def __init__(self, size, name="0", rank=None, timeout=LIMIT):
        self._size, self.group_name, self._timeout = size, name, timedelta(seconds=timeout)
        self._rank = rank_of_this_thread() if rank is None else rank

    def _get_backend(self, device):
        return SimpleNamespace(options=SimpleNamespace(_timeout=self._timeout))

    def size(self):
        return self._size

    def rank(self):
        return self._rank


@pytest.fixture
def store(monkeypatch):
    store = HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "get_rank", rank_of_this_thread)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(group.size())))
    monkeypatch.setattr(distributed_c10d, "_get_object_coll_device", lambda group: "cpu")
    # Threads share the ProcessGroup class, which this would patch.
    monkeypatch.setattr(
        "megatron.core.transformer._cuda_graphs.agreement._before_each_collective", lambda join: ExitStack()
    )
    return store


def rank_of_this_thread():
    name = threading.current_thread().name
    return int(name) if name.isdigit() else 0


def on_ranks(count, run):
    """Return the results of ``run(rank)``, or the exceptions it raises, for all ranks."""
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


def agreement_of(rank, layout="one group", timeout=LIMIT) -> CaptureAgreement:
    """Return the ``CaptureAgreement`` of ``rank``.

    Args:
        layout: "one group" of two ranks, "crossing" tensor- and data-parallel groups of four ranks, or "stages": two
            pipeline stages of two ranks.
    """
    row, column = divmod(rank, 2)
    groups: Any = SimpleNamespace(tp_dp_cp=Group(2, timeout=timeout), pp=Group(1))
    if layout == "crossing":
        groups = SimpleNamespace(tp=Group(2, f"tp {row}", column), dp_cp=Group(2, f"dp {column}", row), pp=Group(1))
    if layout == "stages":
        groups = SimpleNamespace(tp_dp_cp=Group(2, f"stage {row}", column), pp=Group(2, f"pipeline {column}", row))
    return CaptureAgreement(groups, with_other_stages=True)


def join(agreed, where):
    """Begin the pass named ``where`` and vote, as ranks do before a collective."""
    agreed.begin(where)
    agreed._vote(agreed._of_stage)


@pytest.mark.usefixtures("store")
class TestBallot:
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_no_rank_gets_ahead(self, size):
        order = []

        def run(rank):
            ballot = Ballot(Group(size))
            for number in range(20):
                order.append(number)
                assert ballot.vote() == {} and ballot.failure is None

        assert on_ranks(size, run) == [None] * size
        assert order == sorted(order)

    def test_captures_share_connections_and_keys(self, store):
        def run(rank):
            group, kept = Group(3), []
            for capture in range(4):
                ballot = Ballot(group)
                assert ballot.vote(blockers={"a": f"reason {capture}" if rank == 1 else ""}) == {
                    "a": f"reason {capture}"
                }
                ballot.vote(Failure(2, "here", f"cause {capture}") if rank == 2 else None)
                assert ballot.failure == Failure(2, "here", f"cause {capture}")
                kept.append(store.num_keys())
            assert kept[1:] == kept[:1] * 3

        assert on_ranks(3, run) == [None] * 3


@pytest.mark.usefixtures("store")
class TestCaptures:
    def capture(self, layout="one group", fails_on=None, error: BaseException = A_FAULT, blocked=()):
        """Capture two layers on each rank; return each rank's agreed reasons against the capture, or its error.

        ``fails_on`` is the pair (rank, layer) that raises ``error``. Ranks in ``blocked`` rule out the capture.
        """
        undone = []

        def run(rank):
            agreed = agreement_of(rank, layout)
            with agreed.together(lambda: undone.append(rank)):
                join(agreed, "before the first layer")
                if (rank, -1) == fails_on:
                    raise error
                agreed_on = agreed.blockers({"a": f"reason {rank}" if rank in blocked else "", "b": ""})
                for layer in range(2):
                    join(agreed, f"layer {layer}, forward")
                    if (rank, layer) == fails_on:
                        raise error
            return agreed_on

        ranks = 2 if layout == "one group" else 4
        results = on_ranks(ranks, run)
        assert sorted(undone) == ([] if fails_on is None else list(range(ranks)))
        return results

    @pytest.mark.parametrize("layout", ["one group", "crossing", "stages"])
    @pytest.mark.parametrize("rank", [None, 0, 1, 3])
    def test_blocker_of_one_rank_reaches_all(self, layout, rank):
        results = self.capture(layout, blocked=(rank,))
        on_other = f"reason {rank} (on rank {rank})" if rank is not None and rank < len(results) else ""
        for each, result in enumerate(results):
            assert result == {"a": f"reason {rank}" if each == rank else on_other, "b": ""}

    @pytest.mark.parametrize("layout", ["one group", "crossing", "stages"])
    @pytest.mark.parametrize("fails_on", [(0, 0), (1, -1), (1, 1)])
    def test_failure_raises_the_same_error_everywhere(self, layout, fails_on):
        errors = self.capture(layout, fails_on)
        rank, layer = fails_on
        where = "before the first layer" if layer == -1 else f"layer {layer}, forward"
        assert {type(error) for error in errors} == {CaptureFailedError}
        assert {str(error) for error in errors} == {
            f"CUDA graph capture failed on rank {rank}, {where}: RuntimeError: a fault"
        }
        assert str(errors[rank].__cause__) == "a fault"

    @pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(1)], ids=repr)
    def test_interrupt_ends_all_ranks(self, interrupt):
        errors = self.capture("stages", (3, 1), interrupt)
        assert [type(error) for error in errors] == [CaptureInterruptedError] * 3 + [type(interrupt)]
        shown = f"{type(interrupt).__name__}: {interrupt}".removesuffix(": ")
        expected = f"CUDA graph capture was interrupted on rank 3, layer 1, forward: {shown}"
        assert {str(error) for error in errors[:3]} == {expected}

    def test_rank_that_never_votes_fails_the_capture(self):
        def run(rank):
            agreed = agreement_of(rank, timeout=SHORT)
            if rank == 0:
                with (
                    pytest.raises(CaptureFailedError, match="rank 1 exited, or did not"),
                    agreed.together(lambda: None),
                ):
                    join(agreed, "layer 1")

        assert on_ranks(2, run) == [None, None]


class Interrupted:
    """Thread pool that raises KeyboardInterrupt in the thread that waits for call ``at`` (from 0)."""

    def __init__(self, pool, at):
        self._pool, self._left = pool, at

    def submit(self, *call):
        future = self._pool.submit(*call)
        self._left -= 1
        return SimpleNamespace(result=mock.Mock(side_effect=KeyboardInterrupt)) if self._left == -1 else future


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("at", [0, 2, LAYERS], ids=["first vote", "third vote", "last vote"])
@pytest.mark.parametrize(("layout", "ballot"), [("one group", 0), ("crossing", 1)], ids=["one group", "second of two"])
def test_ctrl_c_during_a_vote_leaves_no_rank_waiting(layout, ballot, at):
    connected = []

    def run(rank):
        agreed = agreement_of(rank, layout)
        connected.append(agreed)  # losing the connection would end a wait
        interrupted = agreed._ballots[ballot]
        if rank == 1:
            interrupted._thread = Interrupted(interrupted._thread, at)
        with agreed.together(lambda: None):
            for layer in range(LAYERS):
                join(agreed, f"layer {layer}")

    errors = on_ranks(2 if layout == "one group" else 4, run)
    assert type(errors.pop(1)) is KeyboardInterrupt
    if at == LAYERS:  # the other ranks have captured
        assert {*errors} == {None}
        return
    assert {type(error) for error in errors} == {CaptureInterruptedError}
    assert all("was interrupted on rank 1, " in str(error) for error in errors)


class Fault(Exception):
    """Error that a rank raises instead of voting."""


@pytest.fixture
def group(ranks):
    return dist.group.WORLD


@contextmanager
def in_place_of_torch(names, call):
    """Replace the methods ``names`` of process groups with ``call`` while in this context."""

    def standing_for(name):
        return lambda group, *args, **kwargs: call(name, group, *args, **kwargs)

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, standing_for(name)))
        yield


@pytest.mark.usefixtures("side_stream")
class TestBeforeEachCollective:
    def test_all_launching_methods_are_listed(self):
        signatures = {name: getattr(dist.ProcessGroup, name).__doc__ or "" for name in dir(dist.ProcessGroup)}
        launching = {name for name, signature in signatures.items() if re.search(r"-> \S*Work\b", signature)}
        # "reconfigure" changes the ranks of a group, which no layer does; "monitored_barrier" returns no work.
        assert launching - {"_end_coalescing", "reconfigure"} | {"monitored_barrier"} == {*LAUNCHING}

    def test_failed_vote_prevents_the_launch(self, group):
        launched, refuse = mock.Mock(), mock.Mock(side_effect=Fault)
        with in_place_of_torch(["allreduce"], launched), pytest.raises(Fault), _before_each_collective(refuse):
            group.allreduce()
        assert not launched.called

    def test_other_threads_need_no_vote(self, group):
        join, launched = mock.Mock(), mock.Mock()
        with in_place_of_torch(["allreduce"], launched), _before_each_collective(join):
            thread = threading.Thread(target=group.allreduce)
            thread.start()
            thread.join()
        assert launched.called
        assert not join.called

    def test_backward_collectives_need_a_vote(self, group):
        class Reduced(torch.autograd.Function):
            @staticmethod
            def forward(ctx, tensor):
                return tensor.clone()

            @staticmethod
            def backward(ctx, grad):
                dist.all_reduce(grad := grad.clone())
                return grad

        join = mock.Mock()
        with _before_each_collective(join):
            Reduced.apply(torch.ones(2, requires_grad=True)).sum().backward()
        assert join.call_count == 1

    BATCH = ("_start_coalescing", "send", "recv", "_end_coalescing")

    def test_batch_needs_one_vote(self, group):
        events = []
        with (
            in_place_of_torch(self.BATCH, lambda name, *_: events.append(name)),
            _before_each_collective(lambda: events.append("join")),
        ):
            for _ in range(2):
                for name in self.BATCH:
                    getattr(group, name)(torch.device("cpu"))
        assert events == ["join", *self.BATCH] * 2

    @pytest.mark.parametrize("begins", [False, True])
    def test_open_batch_is_dropped_after_an_exception(self, group, begins):
        join = mock.Mock(side_effect=None if begins else Fault)
        with (
            in_place_of_torch(self.BATCH, mock.Mock()),
            pytest.raises(Fault),
            _before_each_collective(join),
            dist._coalescing_manager(group, torch.device("cpu")),
        ):
            raise Fault
        assert join.call_count == 1
        assert group not in dist.distributed_c10d._world.pg_coalesce_state

    @pytest.mark.parametrize("holds", ["layer", "model"])
    def test_capture_votes_before_every_unrecorded_collective(self, ranks, holds):
        events = []

        def note(name):
            call = getattr(dist.ProcessGroup, name)

            def launch(group, *args, **kwargs):
                if group.size() > 1 and not torch.cuda.is_current_stream_capturing():
                    events.append("launch")
                return call(group, *args, **kwargs)

            return launch

        def vote(agreement, ballots, blockers=None):
            assert not torch.cuda.is_current_stream_capturing()
            events.append("vote")
            return dict(blockers or {})

        with captured(graphed(holds)) as training, ExitStack() as stack:
            training.helper.delete_cuda_graphs()
            stack.enter_context(mock.patch.object(CaptureAgreement, "_vote", vote))
            for name in LAUNCHING:
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, note(name)))
            training.helper.create_cudagraphs()
        # The first vote decides the scope of graphs; the last two, of the stage and of all stages, end the capture.
        assert events == ["vote", *["vote", "launch"] * ((len(events) - 3) // 2), "vote", "vote"]
        assert len(events) > 2 * len(training.layers)
