"""_CudaGraphRunner: its attributes, among them graphs that can be deleted and assigned."""

import weakref

import pytest
import torch

from megatron.core.transformer.cuda_graphs import _CudaGraphRunner

from .local_graph_cases import HIDDEN, batch, record, recorded_runners, runners, stack

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class TestGraphs:
    @pytest.mark.parametrize("name", ["fwd_graph", "bwd_graph"])
    @pytest.mark.parametrize("how", ["delete", "assign None"])
    def test_are_freed_when_one_is_given_up(self, name, how):
        runner, *_ = recorded_runners()
        graphs = [weakref.ref(runner.fwd_graph), weakref.ref(runner.bwd_graph)]
        if how == "delete":
            delattr(runner, name)
        else:
            setattr(runner, name, None)
        assert [graph() for graph in graphs] == [None, None]
        assert (runner.fwd_graph, runner.bwd_graph) == (None, None)

    def test_can_be_deleted_twice_and_before_they_are_captured(self):
        model = stack(count=1)
        model(batch(0))
        (runner,) = runners(model)
        for _ in range(2):
            assert hasattr(runner, "fwd_graph")
            del runner.fwd_graph, runner.bwd_graph

    def test_without_them_a_replay_is_refused(self):
        model = stack(count=1)
        record(model)
        (runner,) = runners(model)
        del runner.fwd_graph
        with pytest.raises(RuntimeError, match="has no CUDA graph to replay"):
            model(batch(1))

    def test_of_another_kind_may_be_assigned(self):
        runner, *_ = recorded_runners()
        runner.fwd_graph = other = object()
        assert runner.fwd_graph is other


def test_is_written_as_its_layer_and_shapes():
    runner, *_ = recorded_runners(scale=torch.ones(1, HIDDEN).cuda())
    assert str(runner) == "layer 1 (Layer) on (3, 8), (1, 8)"


def test_recording_capture_and_replay_add_no_attribute():
    model = stack(count=1)
    record(model)
    model(batch(1)).sum().backward()
    (used,) = runners(model)
    new = _CudaGraphRunner(model.layers[0], used.mempool, (batch(0),), {}, None, True)
    assert set(vars(used)) == set(vars(new))
