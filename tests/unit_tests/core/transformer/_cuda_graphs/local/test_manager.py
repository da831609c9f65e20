"""Test which calls CudaGraphManager replays, runs eagerly or rejects."""

import copy

import pytest
import torch

from megatron.core.transformer._cuda_graphs.hooks import runs_outside_graphs
from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

from .local_graph_cases import batch, eager_calls, record, stack, train

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


def test_unsupported_type_is_refused_when_recorded():
    model = stack(count=1)
    with pytest.raises(TypeError, match="does not support arguments of type object"):
        model(batch(0), other=object())


def test_unrecorded_model_is_refused():
    record(stack())
    with pytest.raises(RuntimeError, match=r"(?s)no CUDA graph of Layer.*did not run in the recorded step"):
        stack()(batch(0))


def test_copy_of_captured_model_trains_like_the_original():
    def run(graphs):
        model = stack(graphs=graphs, dropout=0.5)
        train(model, steps=2)
        copied = copy.deepcopy(model)
        delete_cuda_graphs()
        return [train(copied, steps=3), eager_calls(copied)]

    (eager, _), (graphed, calls) = run(graphs=False), run(graphs=True)
    assert graphed == eager
    assert calls == [calls[0]] * 3


class TestManager:
    def test_manager_leaves_default_stream_until_capture(self):
        default = torch.cuda.default_stream()
        streams: list = []
        with torch.cuda.stream(default):
            model = stack()
            assert torch.cuda.current_stream() != default  # DistributedDataParallel uses the parameters on this stream
            model.layers[0].linear.register_forward_hook(lambda *_: streams.append(torch.cuda.current_stream()))
            record(model)
            assert streams[0] != default
            assert torch.cuda.current_stream() == default

    @pytest.mark.parametrize("grad", [True, False], ids=["grad", "recomputation"])
    def test_replays_run_ddp_hooks(self, grad):
        model = stack(count=1)
        record(model)
        called = []

        def hook(module, *_):
            called.append(module)

        hook.__module__ = "megatron.core.distributed.distributed_data_parallel"
        model.layers[0].linear.register_forward_pre_hook(hook)
        with torch.set_grad_enabled(grad):
            model(batch(1))
        assert called == [model.layers[0].linear]

    def test_replays_refuse_other_forward_pre_hooks(self):
        model = stack(count=1)
        record(model)
        model.layers[0].linear.register_forward_pre_hook(lambda module, args: None)
        with pytest.raises(RuntimeError, match="Linear has a forward-pre hook"):
            model(batch(1))

    def test_hooks_outside_the_graph_are_not_called(self):
        model = stack(count=1)
        model.layers[0].experts = torch.nn.Linear(1, 1)  # outside of the graph
        called = []
        record(model)
        model.layers[0].experts.register_forward_pre_hook(lambda module, args: called.append(module))
        model(batch(1)).sum().backward()
        assert not called

    def test_hooks_of_megatron_fsdp_are_refused(self):
        model = stack(count=1)
        model.layers[0].linear.register_forward_pre_hook(runs_outside_graphs(lambda module, args: None))
        with pytest.raises(ValueError, match="--use-megatron-fsdp with --cuda-graph-impl local"):
            model(batch(0))
