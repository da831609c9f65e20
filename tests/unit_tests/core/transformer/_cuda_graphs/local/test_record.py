"""Test capture, failed capture and deletion of recorded graphs."""

import gc
import weakref

import pytest
import torch

from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.cuda_graphs import (
    CudaGraphManager,
    _CudagraphGlobalRecord,
    create_cudagraphs,
    delete_cuda_graphs,
)

from .local_graph_cases import batch, eager_calls, record, runners, stack, train

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class TestCreation:
    def test_capture_returns_time_and_memory(self):
        assert record(stack(count=1)).keys() == {"time", "allocated_bytes", "reserved_bytes"}

    def test_empty_record_is_not_captured(self):
        assert create_cudagraphs() is None
        assert not _CudagraphGlobalRecord.cudagraph_created


class TestFailedCapture:
    @pytest.fixture(params=["forward", "backward"])
    def failing(self, request):
        """Return a stack whose second layer reads a value on the host in its forward or backward pass."""
        model = stack(dropout=0.5)
        self.reads = True

        def read(module, args, output):
            if self.reads and request.param == "forward":
                output.sum().item()
            elif self.reads and output.requires_grad:
                output.register_hook(lambda grad: (grad.sum().item(), None)[1])

        model.layers[1].linear.register_forward_hook(read)
        return model

    def test_capture_error_names_layer_and_flag(self, failing):
        with pytest.raises(RuntimeError) as error:
            record(failing)
        (note, *_) = [note for note in error.value.__notes__ if "--cuda-graph-impl local" in note]
        assert "layer 2" in note

    def test_training_continues_eagerly(self, failing):
        losses = []
        with pytest.raises(RuntimeError):
            record(failing)
        for step in range(1, 3):
            losses.append(failing(batch(step)).square().mean())
            losses[-1].backward()
            create_cudagraphs()
        eager = stack(graphs=False, dropout=0.5)
        for step in range(3):
            reference = eager(batch(step)).square().mean()
            reference.backward()
        assert losses[-1].item() == reference.item()
        assert [p.grad.tolist() for p in failing.parameters()] == [p.grad.tolist() for p in eager.parameters()]

    def test_other_models_train_eagerly_until_deletion(self, failing):
        with pytest.raises(RuntimeError):
            record(failing)
        other = stack()
        assert record(other) is None
        delete_cuda_graphs()
        assert record(other) is not None

    def test_process_state_is_restored(self, failing):
        stream, state = torch.cuda.current_stream(), (gc.isenabled(), torch.cuda.get_rng_state().tolist())
        failing(batch(0)).square().mean().backward()
        state = gc.isenabled(), torch.cuda.get_rng_state().tolist()
        grads = [param.grad.tolist() for param in failing.parameters()]
        with pytest.raises(RuntimeError):
            create_cudagraphs()
        assert (gc.isenabled(), torch.cuda.get_rng_state().tolist()) == state
        assert [param.grad.tolist() for param in failing.parameters()] == grads
        assert torch.cuda.current_stream() == stream
        assert not cuda_graphs.is_graph_capturing()
        assert not cuda_graphs.is_graph_warmup()
        assert CudaGraphManager.global_mempool is None  # torch rejects captures into a pool without graphs

    def test_failed_capture_can_be_retried_after_deletion(self, failing):
        with pytest.raises(RuntimeError):
            record(failing)
        delete_cuda_graphs()
        self.reads = False
        record(failing)
        before = eager_calls(failing)
        failing(batch(1)).sum().backward()
        assert eager_calls(failing) == before


class TestDeletion:
    def test_next_step_is_recorded_with_other_shapes(self):
        def steps(graphs):
            model = stack(graphs=graphs, dropout=0.5)
            trace = train(model, steps=3)
            delete_cuda_graphs()
            for step in range(3):
                loss = model(batch(step, size=5)).square().mean()
                loss.backward()
                create_cudagraphs()
                trace.append((loss.item(), model.before.weight.grad.tolist()))
            return trace, model

        (graphed, model), (eager, _) = steps(graphs=True), steps(graphs=False)
        assert graphed == eager
        assert all(runner.fwd_graph is not None for runner in runners(model))

    def test_frees_graphs_and_static_memory(self):
        model = stack()
        record(model)
        (runner, *_) = runners(model)
        graph, place = weakref.ref(runner.fwd_graph), weakref.ref(runner.graphs.static_inputs[0][0].tensor)
        del runner
        delete_cuda_graphs()
        gc.collect()
        assert graph() is None
        assert place() is None
        assert CudaGraphManager.global_mempool is None

    def test_assigned_record_allows_another_model(self):
        record(stack())
        _CudagraphGlobalRecord.cudagraph_created = False  # like megatron-core's own tests
        _CudagraphGlobalRecord.cudagraph_record = []
        CudaGraphManager.global_mempool = None
        eager = train(stack(graphs=False, dropout=0.5), steps=3)
        model = stack(dropout=0.5)
        assert train(model, steps=3) == eager
        assert all(runner.fwd_graph is not None for runner in runners(model))
