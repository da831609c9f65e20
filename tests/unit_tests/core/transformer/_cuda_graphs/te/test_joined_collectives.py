"""te/joined_collectives: all ranks are asked before each collective outside of stream captures, once."""

import re
import threading
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core.transformer._cuda_graphs.te import joined_collectives as module
from megatron.core.transformer._cuda_graphs.te.agreement import CaptureAgreement
from megatron.core.transformer._cuda_graphs.te.joined_collectives import (
    BARRIERS,
    BETWEEN_TWO,
    WRITING,
    joined_collectives,
)
from megatron_fsdp_cuda_graphs.cpu_backend import distributed as cpu_distributed
from tests.unit_tests.core.distributed.captured_training import captured, graphed

pytestmark = pytest.mark.usefixtures("side_stream")

LAUNCHING = [*WRITING, *BARRIERS, *BETWEEN_TWO]


class Fault(Exception):
    """Raised by a collective, or in place of ranks' agreement."""


@pytest.fixture
def group(ranks):
    return dist.group.WORLD


@contextmanager
def in_place_of_torch(names, call):
    """Let ``call(name, group, ...)`` stand for the methods ``names`` of process groups."""

    def standing_for(name):
        return lambda group, *args, **kwargs: call(name, group, *args, **kwargs)

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, standing_for(name)))
        yield


def test_every_method_that_launches_work_is_met():
    signatures = {name: getattr(dist.ProcessGroup, name).__doc__ or "" for name in dir(dist.ProcessGroup)}
    launching = {name for name, signature in signatures.items() if re.search(r"-> \S*Work\b", signature)}
    # "reconfigure" exchanges the ranks of a group, which no layer does; "monitored_barrier" returns no work.
    assert launching - {"_end_coalescing", "reconfigure"} | {"monitored_barrier"} == {*LAUNCHING}
    assert cpu_distributed.WRITING == WRITING


@pytest.mark.parametrize("name", LAUNCHING)
def test_ranks_are_asked_right_before_each(group, name):
    events: list = []
    with (
        in_place_of_torch([name], lambda *call, **options: events.append((call, options))),
        joined_collectives(lambda: events.append("join")),
    ):
        getattr(group, name)(1, timeout=2)
    assert events == ["join", ((name, group, 1), {"timeout": 2})]


@pytest.mark.parametrize("name", LAUNCHING)
def test_none_is_launched_where_ranks_do_not_agree(group, name):
    launched = mock.Mock()
    with in_place_of_torch([name], launched), joined_collectives(mock.Mock(side_effect=Fault)), pytest.raises(Fault):
        getattr(group, name)()
    assert not launched.called


def test_what_a_capture_records_asks_no_one(group, monkeypatch):
    join = mock.Mock()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with in_place_of_torch(["allreduce"], mock.Mock()), joined_collectives(join):
        group.allreduce()
    assert not join.called


def test_a_group_of_one_rank_asks_no_one(ranks):
    from megatron.core import parallel_state

    join = mock.Mock()
    with joined_collectives(join):
        dist.all_reduce(torch.ones(1), group=parallel_state.get_tensor_model_parallel_group())
    assert not join.called


def test_another_thread_asks_no_one(group):
    join, launched = mock.Mock(), mock.Mock()
    with in_place_of_torch(["allreduce"], launched), joined_collectives(join):
        thread = threading.Thread(target=group.allreduce)
        thread.start()
        thread.join()
    assert launched.called
    assert not join.called


@pytest.mark.parametrize("operation", [dist.all_reduce, lambda tensor: dist.all_reduce(tensor, async_op=True).wait()])
def test_calls_of_torch_distributed_are_met_in_backward_passes_too(group, operation):
    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.clone()

        @staticmethod
        def backward(ctx, grad):
            operation(grad := grad.clone())
            return grad

    join = mock.Mock()
    with joined_collectives(join):
        Reduced.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert join.call_count == 1


class TestBatches:
    METHODS = ("_start_coalescing", "send", "recv", "_end_coalescing")

    def test_ranks_are_asked_once_before_a_batch(self, group):
        events = []
        with (
            in_place_of_torch(self.METHODS, lambda name, *_: events.append(name)),
            joined_collectives(lambda: events.append("join")),
        ):
            for _ in range(2):
                for name in self.METHODS:
                    getattr(group, name)(torch.device("cpu"))
        assert events == ["join", *self.METHODS] * 2

    def test_none_begins_where_ranks_do_not_agree(self, group):
        begun = mock.Mock()
        refuse = mock.Mock(side_effect=Fault)
        with in_place_of_torch(self.METHODS, begun), joined_collectives(refuse), pytest.raises(Fault):
            group._start_coalescing(torch.device("cpu"))
        assert not begun.called

    @pytest.mark.parametrize("begins", [False, True])
    def test_torch_forgets_one_that_an_exception_leaves_open(self, group, begins):
        join = mock.Mock(side_effect=None if begins else Fault)
        with (
            in_place_of_torch(self.METHODS, mock.Mock()),
            pytest.raises(Fault),
            joined_collectives(join),
            dist._coalescing_manager(group, torch.device("cpu")),
        ):
            raise Fault
        assert join.call_count == 1
        assert group not in dist.distributed_c10d._world.pg_coalesce_state

    def test_other_groups_are_met_meanwhile(self, group):
        join, other = mock.Mock(), dist.new_group([0, 1])
        with in_place_of_torch((*self.METHODS, "allreduce"), mock.Mock()), joined_collectives(join):
            group._start_coalescing(torch.device("cpu"))
            other.allreduce()
        assert join.call_count == 2


@pytest.mark.parametrize("launched", [False, True])
def test_one_that_fails_on_this_rank_is_launched_before_the_exception_goes_on_unless_it_was(
    group, monkeypatch, launched
):
    work = mock.Mock()
    launch = mock.Mock(side_effect=[Fault("first"), work])
    monkeypatch.setattr(module, "launches_of", lambda group: lambda: launched)
    with in_place_of_torch(["allreduce"], launch), joined_collectives(mock.Mock()), pytest.raises(Fault, match="first"):
        group.allreduce(1)
    assert launch.call_args_list == [mock.call("allreduce", group, 1)] * (1 if launched else 2)
    assert work.wait.called == (not launched)


def test_a_second_failure_does_not_hide_the_first(group, monkeypatch):
    monkeypatch.setattr(module, "launches_of", lambda group: lambda: False)
    launch = mock.Mock(side_effect=[Fault("first"), Fault("second")])
    with in_place_of_torch(["allreduce"], launch), joined_collectives(mock.Mock()), pytest.raises(Fault, match="first"):
        group.allreduce()


@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_process_groups_are_as_before(group, fails):
    before = dict(vars(dist.ProcessGroup))
    try:
        with joined_collectives(mock.Mock()):
            assert dict(vars(dist.ProcessGroup)) != before
            if fails:
                raise Fault
    except Fault:
        pass
    assert dict(vars(dist.ProcessGroup)) == before


@pytest.mark.parametrize("layers_per_graph", [0, 1, -1])
def test_ranks_agree_before_every_collective_of_a_capture_that_is_not_recorded(ranks, layers_per_graph):
    events = []

    def note(name):
        call = getattr(dist.ProcessGroup, name)

        def launch(group, *args, **kwargs):
            if group.size() > 1 and not torch.cuda.is_current_stream_capturing():
                events.append("launch")
            return call(group, *args, **kwargs)

        return launch

    def vote(agreement):  # what both do
        assert not torch.cuda.is_current_stream_capturing()
        events.append("vote")

    with captured(graphed(layers_per_graph)) as training, ExitStack() as stack:
        training.helper.delete_cuda_graphs()
        for name in ("join", "finish"):
            stack.enter_context(mock.patch.object(CaptureAgreement, name, vote))
        for name in LAUNCHING:
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, note(name)))
        training.helper.create_cudagraphs()
    assert events == ["vote", "launch"] * (len(events) // 2) + ["vote"]  # the last before the graphs are attached
    assert len(events) > 2 * len(training.layers)
