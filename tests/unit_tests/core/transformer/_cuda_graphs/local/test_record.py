"""_CudagraphGlobalRecord: when graphs are captured and forgotten, and what a failed capture leaves."""

import gc
import weakref
from unittest import mock

import pytest
import torch

from megatron.core.transformer import cuda_graphs
from megatron.core.transformer._cuda_graphs.engine.memory import REUSE_OPTION, allocator_settings
from megatron.core.transformer._cuda_graphs.local.record import Recording
from megatron.core.transformer.cuda_graphs import (
    CudaGraphManager,
    _CudagraphGlobalRecord,
    create_cudagraphs,
    delete_cuda_graphs,
)

from .local_graph_cases import (
    HIDDEN,
    batch,
    eager_calls,
    record,
    runners,
    stack,
    train,
)

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class TestCreation:
    def test_makes_all_generators_safe_before_the_first_capture(self, generators_made_safe):
        record(stack(dropout=0.5))
        assert generators_made_safe()

    def test_the_error_of_a_capture_is_raised_though_nothing_can_be_cleaned_up(self):
        model = stack(count=1)
        model(batch(0)).sum().backward()

        def fail(*args):
            raise KeyError("clean-up")

        with (
            mock.patch.object(Recording, "capture", side_effect=ZeroDivisionError),
            mock.patch.object(_CudagraphGlobalRecord, "forget_graphs", fail),
            pytest.raises(ZeroDivisionError) as error,
        ):
            create_cudagraphs()
        assert error.value.__notes__ == ["What the failed capture left could not be cleaned up: 'clean-up'"]

    def test_capture_returns_time_and_memory(self):
        assert record(stack(count=1)).keys() == {"time", "allocated_bytes", "reserved_bytes"}

    def test_capture_uses_memory_again_that_several_streams_used(self):
        reused = []
        model = stack(count=1)
        model.layers[0].linear.register_forward_pre_hook(lambda *_: reused.append(allocator_settings()[REUSE_OPTION]))
        record(model)
        assert True in reused
        assert not allocator_settings()[REUSE_OPTION]

    def test_nothing_is_captured_where_nothing_was_recorded(self):
        assert create_cudagraphs() is None
        assert not _CudagraphGlobalRecord.cudagraph_created


class TestFailedCapture:
    @pytest.fixture(params=["forward", "backward"])
    def failing(self, request):
        """A stack whose second layer reads a value on the host in that pass."""
        model = stack(dropout=0.5)
        self.reads = True

        def read(module, args, output):
            if self.reads and request.param == "forward":
                output.sum().item()
            elif self.reads and output.requires_grad:
                output.register_hook(lambda grad: (grad.sum().item(), None)[1])

        model.layers[1].linear.register_forward_hook(read)
        return model

    def test_names_the_layer_and_the_flag(self, failing):
        with pytest.raises(RuntimeError) as error:
            record(failing)
        (note, *_) = [note for note in error.value.__notes__ if "--cuda-graph-impl local" in note]
        assert "layer 2" in note

    def test_leaves_a_model_that_trains_on_eagerly(self, failing):
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

    def test_leaves_the_process_as_it_was(self, failing):
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
        assert CudaGraphManager.global_mempool is None  # a pool without graphs cannot be captured into again

    def test_leaves_other_models_to_be_recorded(self, failing):
        with pytest.raises(RuntimeError):
            record(failing)
        model = stack()
        record(model)
        before = eager_calls(model)
        model(batch(1)).sum().backward()
        assert eager_calls(model) == before
        calls = eager_calls(failing)
        failing(batch(1)).sum().backward()
        assert eager_calls(failing) == [count + 1 for count in calls]

    def test_is_logged_once(self, failing, caplog):
        with caplog.at_level("WARNING"):
            with pytest.raises(RuntimeError):
                record(failing)
            for step in range(1, 3):
                failing(batch(step)).sum().backward()
                create_cudagraphs()
        assert [r.message for r in caplog.records if "--cuda-graph-impl local" in r.message] == [
            "the capture of CUDA graphs failed (--cuda-graph-impl local): the modules that were recorded run eagerly "
            "until delete_cuda_graphs() is called"
        ]

    def test_can_be_tried_again_after_delete_cuda_graphs(self, failing):
        with pytest.raises(RuntimeError):
            record(failing)
        delete_cuda_graphs()
        self.reads = False
        record(failing)
        before = eager_calls(failing)
        failing(batch(1)).sum().backward()
        assert eager_calls(failing) == before


class TestDeletion:
    def test_lets_the_next_step_be_recorded_anew_with_other_shapes(self):
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

    def test_collects_garbage_and_then_gives_back_cached_memory(self):
        class Cycle:
            def __init__(self):
                self.itself = self

        gone = weakref.ref(Cycle())
        with mock.patch.object(torch.cuda, "empty_cache", side_effect=lambda: found.append(gone())):
            found: list = []
            delete_cuda_graphs()
        assert found == [None]

    def test_by_assignment_lets_another_model_be_recorded(self):
        record(stack())
        _CudagraphGlobalRecord.cudagraph_created = False  # as megatron-core's own tests do
        _CudagraphGlobalRecord.cudagraph_record = []
        CudaGraphManager.global_mempool = None
        eager = train(stack(graphs=False, dropout=0.5), steps=3)
        model = stack(dropout=0.5)
        assert train(model, steps=3) == eager
        assert all(runner.fwd_graph is not None for runner in runners(model))

    def test_a_shared_tensor_that_was_noted_in_one_recording_is_new_in_the_next(self):
        model, scale = stack(), torch.ones(1, HIDDEN).cuda()
        for _ in range(2):
            record(model, scale=scale)
            assert cuda_graphs.fwd_buffer_reuse_ref_count == 0
            assert scale.cg_buffer_metadata.input_use_count == 3
            delete_cuda_graphs()
