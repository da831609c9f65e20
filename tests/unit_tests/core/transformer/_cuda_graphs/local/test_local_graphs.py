"""Local graphs: layers recorded in the first step and replayed from the second compute what they compute eagerly."""

import gc
import weakref
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer._cuda_graphs.hooks import runs_outside_graphs
from megatron.core.transformer._cuda_graphs.local.session import CaptureSession
from megatron.core.transformer.cuda_graphs import (
    ArgMetadata,
    CudaGraphManager,
    _CudagraphGlobalRecord,
    _GraphStatus,
    alloc_tensor_from_graph_mempool,
    create_cudagraphs,
    delete_cuda_graphs,
)
from megatron_fsdp_cuda_graphs.cpu_backend.pools import pool_of

from .local_graph_cases import (
    HIDDEN,
    Layer,
    Stack,
    batch,
    config,
    eager_calls,
    groups,
    record,
    runners,
    stack,
    train,
    use_graphable_rng,
)

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class TestTraining:
    @pytest.mark.parametrize("dropout", [0.0, 0.5])
    @pytest.mark.parametrize("microbatches", [1, 3])
    def test_is_bit_for_bit_eager(self, dropout, microbatches):
        eager = train(stack(graphs=False, dropout=dropout), microbatches=microbatches)
        model = stack(dropout=dropout)
        assert train(model, microbatches=microbatches) == eager
        assert eager_calls(model) == [microbatches + 3] * 3  # the recorded step, two to warm up, and the capture

    def test_draws_from_the_generator_state_that_is_in_use_around_the_layers(self):
        class DrawsWhereItIs(Layer):
            def forward(self, hidden_states, *args, **kwargs):
                dropped = torch.nn.functional.dropout(hidden_states, 0.5, self.training)
                return super().forward(dropped, *args, **kwargs)

        def losses(graphs):
            torch.manual_seed(5)
            torch.cuda.manual_seed(5)
            use_graphable_rng()
            model, found = Stack([DrawsWhereItIs(graphs=graphs)]).cuda(), []
            for step in range(4):
                with get_cuda_rng_tracker().fork():  # as the decoder does under sequence parallelism
                    loss = model(batch(step)).square().mean()
                loss.backward()
                create_cudagraphs()
                found += [loss.item(), torch.rand(2, device="cuda").tolist()]
            return found

        assert losses(graphs=True) == losses(graphs=False)

    def test_takes_another_tensor_in_every_step_that_all_layers_share(self):
        def steps(graphs):
            model = stack(graphs=graphs)
            trace = []
            for step in range(4):
                scale = torch.full((1, HIDDEN), 1.0 + step).cuda()
                loss = model(batch(step), scale=scale).square().mean()
                loss.backward()
                create_cudagraphs()
                trace.append((loss.item(), model.before.weight.grad.tolist()))
            return trace

        assert steps(graphs=True) == steps(graphs=False)

    def test_sees_a_shared_tensor_that_is_changed_in_place(self):
        def steps(graphs):
            model, scale = stack(graphs=graphs), torch.ones(1, HIDDEN).cuda()
            losses = []
            for step in range(4):
                losses.append(model(batch(step), scale=scale).square().mean())
                losses[-1].backward()
                create_cudagraphs()
                scale.add_(1)
            return [loss.item() for loss in losses]

        assert steps(graphs=True) == steps(graphs=False)

    def test_looks_at_the_modules_that_run_in_the_first_pass_of_a_function_only(self):
        model = stack(count=1, pipeline=2)
        losses = [model(batch(0, microbatch)).sum() for microbatch in range(3)]
        for loss in reversed(losses):
            loss.backward()
        register = torch.nn.Module.register_forward_hook
        with mock.patch.object(torch.nn.Module, "register_forward_hook", autospec=True, side_effect=register) as hooks:
            create_cudagraphs()
        assert [call.args[0] for call in hooks.call_args_list] == list(model.layers[0].modules())

    def test_with_keywords_in_another_order(self):
        losses: dict[bool, list] = {}
        for graphs in (True, False):
            model = stack(graphs=graphs, count=1)
            for names in (("scale", "hidden_states"), ("hidden_states", "scale")):
                values = {"scale": torch.full((3, HIDDEN), 2.0).cuda(), "hidden_states": batch(1).requires_grad_()}
                out, _ = model.layers[0](**{name: values[name] for name in names})
                out.sum().backward()
                create_cudagraphs()
                losses.setdefault(graphs, []).append(out.tolist())
        assert losses[True] == losses[False]

    def test_in_evaluation_mode_a_layer_runs_eagerly(self):
        model = stack(dropout=0.5)
        record(model)
        before = eager_calls(model)
        model.eval()
        with torch.no_grad():
            out = model(batch(1))
        assert eager_calls(model) == [count + 1 for count in before]
        reference = stack(graphs=False, dropout=0.5).eval()
        reference.load_state_dict(model.state_dict())
        assert torch.equal(out, reference(batch(1)))

    def test_without_grad_graphs_are_replayed(self):
        model = stack()
        record(model)
        before = eager_calls(model)
        with torch.no_grad():
            out = model(batch(1))
        assert eager_calls(model) == before
        model.eval()
        assert torch.equal(out, model(batch(1)))

    def test_a_layer_that_is_called_twice_before_its_backward_pass_has_two_runners(self):
        def steps(graphs):
            model = stack(count=1, graphs=graphs)
            twice = Stack([model.layers[0], model.layers[0]]).cuda()
            twice.load_state_dict({**twice.state_dict(), **model.state_dict()}, strict=False)
            twice.before, twice.after = model.before, model.after
            return train(twice), model

        (graphed, model), (eager, _) = steps(graphs=True), steps(graphs=False)
        assert graphed == eager
        assert len(model.layers[0].cudagraph_manager.cudagraph_runners) == 2

    def test_an_input_that_stays_the_same_is_copied_again_where_gradients_were_since(self):
        def steps(graphs):
            torch.manual_seed(5)
            use_graphable_rng()
            model = _Scaled([Layer(i + 1, graphs) for i in range(4)]).cuda()
            return train(model, steps=3, scales=[batch(900 + i) for i in range(4)])

        assert steps(True) == steps(False)

    def test_a_gradient_of_main_grad_is_added_inside_the_graph(self):
        def steps(graphs):
            model = stack(graphs=graphs)
            ran = []
            for param in model.parameters():
                param.main_grad = torch.ones_like(param)
                param.grad_added_to_main_grad = False
                param.register_post_accumulate_grad_hook(lambda param: ran.append(param.grad is None))
                if not graphs:
                    param.register_post_accumulate_grad_hook(add_to_main_grad)
            for step in range(3):
                model(batch(step)).square().mean().backward()
                create_cudagraphs()
                if graphs:
                    for param in [*model.before.parameters(), *model.after.parameters()]:
                        add_to_main_grad(param)
                    if step == 0:
                        for param in model.layers.parameters():
                            add_to_main_grad(param)
            return [param.main_grad.tolist() for param in model.parameters()], model

        (graphed, model), (eager, _) = steps(graphs=True), steps(graphs=False)
        assert graphed == eager
        assert all(param.grad is None for param in model.layers.parameters())

    def test_warm_up_and_capture_add_nothing_to_main_gradients_though_layers_do(self):
        model = stack()
        main_grads = []
        for layer in model.layers:
            layer.linear.weight.main_grad = torch.zeros_like(layer.linear.weight)
            layer.linear.forward = lambda x, weight=layer.linear.weight: _FusedProduct.apply(x, weight)
            main_grads.append(layer.linear.weight.main_grad)
        model(batch(0)).square().mean().backward()
        recorded = [main_grad.tolist() for main_grad in main_grads]
        create_cudagraphs()
        assert [main_grad.tolist() for main_grad in main_grads] == recorded
        model(batch(1)).square().mean().backward()
        assert all(grad.tolist() != before for grad, before in zip(main_grads, recorded, strict=True))

    def test_after_a_replay_each_parameter_has_the_event_that_its_gradient_waits_for(self):
        model = stack()
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param)
        record(model)
        model(batch(1)).sum().backward()
        (runner, *_) = runners(model)
        event = runner.bwd_graph_replay_complete_event
        assert {param._cudagraph_wgrad_ready_event for param in model.layers[0].parameters()} == {event}
        delete_cuda_graphs()
        assert not any(hasattr(param, "_cudagraph_wgrad_ready_event") for param in model.parameters())


class _Scaled(Stack):
    """Every layer has a scale of its own, and something eager behind it."""

    def forward(self, x, *, scales=(), **kwargs):
        x = self.before(x)
        for layer, scale in zip(self.layers, scales, strict=True):
            x, _ = layer(x, scale=scale, **kwargs)
            x = x * 1.5
        return self.after(x)


class _FusedProduct(torch.autograd.Function):
    """Adds the gradient of the weight to its main gradient itself (``--gradient-accumulation-fusion``)."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.main_grad.addmm_(grad.t(), x).add_(1)  # which warm-up, with gradients of zero, would add too
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.zeros_like(weight)


def add_to_main_grad(param):
    """What the hook of DistributedDataParallel does."""
    param.main_grad.add_(param.grad)
    param.grad = None


class TestPipeline:
    """Several micro-batches in flight: each has runners of its own."""

    def run(self, graphs, order, steps=3, dropout=0.5, later=None):
        model = stack(graphs=graphs, pipeline=2, dropout=dropout)
        trace = []
        for step in range(steps):
            waiting = []
            for microbatch, kind in enumerate(order if step == 0 or later is None else later):
                if kind == "F":
                    waiting.append(model(batch(step, microbatch)).square().mean())
                else:
                    loss = waiting.pop(0)
                    loss.backward()
                    trace.append(loss.item())
            create_cudagraphs()
            trace += [param.grad.tolist() for param in model.parameters()]
        return trace, model

    @pytest.mark.parametrize("order", ["FB", "FFBB", "FFBFBB", "FFFBFBFBBB"])
    def test_is_bit_for_bit_eager(self, order):
        graphed, model = self.run(True, order)
        assert graphed == self.run(False, order)[0]
        assert len(runners(model)) == 3 * order.count("F")

    def test_takes_fewer_microbatches_than_were_recorded(self):
        graphed, _ = self.run(True, "FFBFBFBB", later="FFBB")
        assert graphed == self.run(False, "FFBFBFBB", later="FFBB")[0]

    def test_refuses_more_microbatches_in_flight_than_were_recorded(self):
        with pytest.raises(RuntimeError, match=r"for 2 micro-batches, all of which wait.*--global-batch-size"):
            self.run(True, "FFBB", later="FFF")

    def test_refuses_a_forward_pass_that_would_overwrite_memory_in_use(self):
        with pytest.raises(RuntimeError, match=r"layer 1 .* would overwrite memory of layer 1"):
            self.run(True, "FFBFBB", later="FFF")

    def test_refuses_a_backward_pass_that_would_overwrite_memory_in_use(self):
        model = stack(pipeline=2)
        for _ in range(2):
            model(batch(0)).square().mean().backward()  # the first micro-batch is over before the second begins
        create_cudagraphs()
        first = model(batch(1)).square().mean()
        other = model.layers[0].cudagraph_manager.cudagraph_runners[0]
        _CudagraphGlobalRecord.session.turns.begin(other.turn)
        with pytest.raises(RuntimeError, match=r"layer 3 .* would overwrite memory of layer 1"):
            first.backward()

    def test_static_memory_of_a_microbatch_serves_a_later_one(self):
        _, model = self.run(True, "FFBFBFBFBB")
        first = model.layers[0].cudagraph_manager.cudagraph_runners
        assert len(first) == 5
        # the inputs of two micro-batches in flight and, while one of them goes back, the gradient of its output
        assert len(_CudagraphGlobalRecord.tensor_reuse_pool.tensor_strong_refs) == 3
        assert len({runner._slot.inputs[0].data_ptr() for runner in first}) == 3


class CopiesInto(TorchFunctionMode):
    """Counts copies into one tensor."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor, self.count = tensor, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.Tensor.copy_ and args[0] is self.tensor
        return func(*args, **(kwargs or {}))


class TestBuffers:
    def test_a_layer_reads_the_output_of_the_one_before_where_that_puts_it(self):
        model = stack()
        record(model)
        first, second, _ = runners(model)
        assert second._slot.inputs[0].data_ptr() == first._slot.outputs[0].data_ptr()

    def test_a_layer_reads_the_gradient_where_the_one_after_puts_it(self):
        model = stack()
        record(model)
        first, second, _ = runners(model)
        assert first._slot._grad_outputs[0].data_ptr() == second._slot.grad_inputs[0].data_ptr()

    def test_a_tensor_that_all_layers_take_has_one_static_place_and_is_copied_once(self):
        model = stack()
        scale = torch.ones(1, HIDDEN).cuda()
        record(model, scale=scale)
        places = {runner._replay._static_inputs[1][0] for runner in runners(model)}
        assert len(places) == 1
        (place,) = places
        with CopiesInto(place.tensor) as copies:
            model(batch(1), scale=scale.clone())
        assert copies.count == 1

    def test_two_tensors_where_one_was_are_refused(self):
        model = stack()
        one, two = torch.ones(1, HIDDEN).cuda(), torch.ones(1, HIDDEN).cuda()
        record(model, scale=one)
        x = model.before(batch(1))
        x, _ = model.layers[0](x, scale=one)
        with pytest.raises(RuntimeError, match=r"layer 2 .*was one tensor for several graphs"):
            model.layers[1](x, scale=two)

    def test_another_tensor_than_the_output_of_the_layer_before_is_refused(self):
        model = stack()
        record(model)
        x, _ = model.layers[0](model.before(batch(1)))
        with pytest.raises(RuntimeError, match="came straight from another graph"):
            model.layers[1](x.clone())

    def test_graphs_that_are_captured_later_may_use_all_memory_that_no_replay_reads_any_more(self):
        model = stack()
        record(model)
        # A weak reference has a storage of its own, which the pool of the graphs does not know.
        owned = pool_of(CudaGraphManager.global_mempool)._owned
        for runner in runners(model):
            slot = runner._slot
            tensors = [*slot.inputs, *slot.outputs, *slot.grad_inputs, *slot._grad_params]
            kept = [tensor for tensor in tensors if tensor is not None and tensor.untyped_storage()._cdata in owned]
            assert len(kept) == (runner.base_module is model.layers[0])  # the gradient that goes to eager code

    def test_static_gradients_that_another_graph_computes_are_held_by_none(self):
        model = stack()
        record(model)
        addresses = [
            [grad.data_ptr() for grad in runner._slot.grad_inputs if grad is not None] for runner in runners(model)
        ]
        owned = pool_of(CudaGraphManager.global_mempool)._owned
        for runner, (address,) in zip(runners(model)[:-1], addresses[1:], strict=True):
            (grad,) = (grad for grad in runner._slot._grad_outputs if grad is not None)
            assert grad.data_ptr() == address
            assert grad.untyped_storage()._cdata not in owned

    def test_a_pool_that_tensors_were_taken_from_is_released_once_when_it_is_forgotten(self):
        meta = ArgMetadata(batch(0))
        with (
            mock.patch.object(torch._C, "_cuda_beginAllocateCurrentThreadToPool") as begin,
            mock.patch.object(torch._C, "_cuda_releasePool") as release,
        ):
            tensors = [alloc_tensor_from_graph_mempool(meta) for _ in range(3)]
            assert (begin.call_count, release.call_count) == (3, 2)  # the pool stays in use
            delete_cuda_graphs()
            assert release.call_count == 3
            delete_cuda_graphs()
            assert release.call_count == 3
        assert all(torch.equal(tensor, torch.zeros(3, HIDDEN).cuda()) for tensor in tensors)

    def test_no_static_value_waits_after_the_capture(self):
        record(stack(), scale=torch.ones(1, HIDDEN).cuda())
        assert cuda_graphs.fwd_buffer_reuse_ref_count == 0
        assert cuda_graphs.bwd_buffer_reuse_ref_count == 0

    def test_no_static_memory_is_in_use_after_the_capture(self):
        record(stack(), scale=torch.ones(1, HIDDEN).cuda())
        pool = _CudagraphGlobalRecord.tensor_reuse_pool
        # the gradient of the first layer's input goes to eager code: nobody knows for how long; here it is a graph's
        assert len(pool.pool) == len(pool.tensor_strong_refs)


class TestArguments:
    """What a replay refuses, by argument."""

    @pytest.mark.parametrize(
        ("args", "kwargs", "message"),
        [
            ((torch.ones(4, HIDDEN),), {}, r"args\[0\]: shape \(4, 8\), captured with \(3, 8\)"),
            (
                (torch.ones(3, HIDDEN, dtype=torch.float64),),
                {},
                r"args\[0\]: torch.float64, captured with torch.float32",
            ),
            ((torch.ones(3, HIDDEN, device="meta"),), {}, r"args\[0\]: device meta, captured with"),
            ((None,), {}, r"args\[0\]: NoneType, captured with a tensor"),
            ((), {}, "0 positional arguments, captured with 1"),
            ((torch.ones(3, HIDDEN),), {"factor": 2.0}, r"kwargs\['factor'\]: 2.0, captured with 1.5"),
            ((torch.ones(3, HIDDEN),), {"factor": 1}, r"kwargs\['factor'\]: int, captured with float"),
            ((torch.ones(3, HIDDEN),), {"factor": None}, r"kwargs\['factor'\]: NoneType, captured with float"),
            ((torch.ones(3, HIDDEN),), {"scale": torch.ones(1)}, r"kwargs\['scale'\]: Tensor, captured with NoneType"),
            ((torch.ones(3, HIDDEN),), {"other": 1}, "keyword 'other' was not given at capture"),
        ],
    )
    def test_that_differ_are_named(self, args, kwargs, message):
        model = stack(count=1)
        given = {"scale": None, "factor": 1.5}
        record(model, **given)
        with pytest.raises(RuntimeError, match=message):
            model.layers[0](*args, **(given | kwargs))

    def test_a_keyword_that_is_missing_is_named(self):
        model = stack(count=1)
        record(model, factor=1.5)
        with pytest.raises(RuntimeError, match="keyword 'factor' is missing"):
            model.layers[0](torch.ones(3, HIDDEN))

    def test_an_input_that_requires_grad_where_none_did_is_named(self):
        model = stack(count=1)
        layer = model.layers[0]
        layer(batch(0))[0].sum().backward()
        create_cudagraphs()
        layer(batch(1))[0].sum().backward()
        with pytest.raises(RuntimeError, match=r"args\[0\]: requires grad, captured without"):
            layer(batch(1).requires_grad_())

    def test_in_a_pipeline_they_are_named_too(self):
        model = stack(count=1, pipeline=2)
        record(model)
        with pytest.raises(ValueError, match=r"args\[0\]: shape \(4, 8\), captured with \(3, 8\)"):
            model(batch(1, size=4))

    def test_of_a_type_that_no_graph_takes_are_refused_when_recorded(self):
        model = stack(count=1)
        with pytest.raises(TypeError, match="an argument of type object cannot be given"):
            model(batch(0), other=object())

    def test_the_error_says_what_to_do(self):
        model = stack(count=1)
        record(model)
        with pytest.raises(RuntimeError, match=r"--seq-length, --micro-batch-size.*delete_cuda_graphs\(\)"):
            model(batch(1, size=4))


class TestStatus:
    def test_changes_with_each_pass(self):
        model = stack(count=1)
        (runner,) = (record(model), runners(model))[1]
        assert runner.status is _GraphStatus.FWD_READY
        loss = model(batch(1)).sum()
        assert runner.status is _GraphStatus.BWD_READY
        loss.backward()
        assert runner.status is _GraphStatus.FWD_READY

    def test_a_second_forward_pass_needs_a_second_runner(self):
        model = stack(count=1)
        record(model)
        model(batch(1))
        with pytest.raises(RuntimeError, match="it waits for its backward pass"):
            model(batch(1))

    def test_a_second_backward_pass_is_refused(self):
        model = stack(count=1)
        record(model)
        loss = model(batch(1)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="a backward pass, but its forward pass comes next"):
            loss.backward()

    def test_at_the_end_of_a_step_no_runner_is_busy(self):
        model = stack(count=1)
        record(model)
        model(batch(1))
        create_cudagraphs()
        model(batch(1))

    def test_a_forward_pass_that_was_recorded_without_backward_has_no_backward_graph(self):
        model = stack(count=1)
        model(batch(0))
        create_cudagraphs()
        (runner,) = runners(model)
        assert runner.fwd_graph is not None
        assert runner.bwd_graph is None
        with pytest.raises(RuntimeError, match="it was recorded without a backward pass"):
            model(batch(1))


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
        assert all(runner.cudagraph_created for runner in runners(model))

    def test_frees_graphs_and_static_memory(self):
        model = stack()
        record(model)
        (runner, *_) = runners(model)
        graph, place = weakref.ref(runner.fwd_graph), weakref.ref(runner._replay._static_inputs[0][0].tensor)
        del runner
        delete_cuda_graphs()
        gc.collect()
        assert graph() is None
        assert place() is None
        assert CudaGraphManager.global_mempool is None

    def test_a_shared_tensor_that_was_noted_in_one_recording_is_new_in_the_next(self):
        model, scale = stack(), torch.ones(1, HIDDEN).cuda()
        for _ in range(2):
            record(model, scale=scale)
            assert cuda_graphs.fwd_buffer_reuse_ref_count == 0
            assert scale.cg_buffer_metadata.input_use_count == 3
            delete_cuda_graphs()


class TestManager:
    def test_refuses_another_implementation(self):
        use_graphable_rng()
        with pytest.raises(ValueError, match="needs --cuda-graph-impl local, got 'none'"):
            CudaGraphManager(config(cuda_graph_impl="none"), pg_collection=groups())

    def test_refuses_an_rng_tracker_that_graphs_cannot_use(self):
        from megatron.core.tensor_parallel import random

        random.initialize_rng_tracker(use_cudagraphable_rng=False, force_reset=True)
        with pytest.raises(RuntimeError, match="--te-rng-tracker"):
            CudaGraphManager(config(), pg_collection=groups())

    def test_refuses_sharded_weights(self):
        use_graphable_rng()
        with pytest.raises(ValueError, match="--tensor-parallel-num-weight-shards"):
            CudaGraphManager(config(gtp_weight_remat_size=2), pg_collection=groups())

    def test_leaves_the_legacy_default_stream_until_graphs_are_captured(self):
        with torch.cuda.stream(torch.cuda.default_stream()):
            model = stack()
            assert torch.cuda.current_stream() != torch.cuda.default_stream()
            record(model)
            assert torch.cuda.current_stream() == torch.cuda.default_stream()

    @pytest.mark.parametrize("grad", [True, False], ids=["with grad", "before it is computed again"])
    def test_replays_run_hooks_of_distributed_data_parallel(self, grad):
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

    def test_replays_refuse_any_other_forward_pre_hook(self):
        model = stack(count=1)
        record(model)
        model.layers[0].linear.register_forward_pre_hook(lambda module, args: None)
        with pytest.raises(RuntimeError, match="Linear has a forward-pre hook"):
            model(batch(1))

    def test_hooks_of_modules_that_run_outside_the_graph_are_left_to_them(self):
        model = stack(count=1)
        model.layers[0].experts = torch.nn.Linear(1, 1)  # not in the graph
        called = []
        record(model)
        model.layers[0].experts.register_forward_pre_hook(lambda module, args: called.append(module))
        model(batch(1)).sum().backward()
        assert not called

    def test_modules_that_were_not_annotated_count_as_first_and_last(self):
        use_graphable_rng()
        layer = Layer(number=99).cuda()
        del layer.is_first_layer
        layer(batch(0))
        (runner,) = layer.cudagraph_manager.cudagraph_runners
        assert (runner.is_first_layer, runner.is_last_layer) == (True, True)

    def test_the_error_of_a_capture_is_raised_though_nothing_can_be_cleaned_up(self):
        model = stack(count=1)
        model(batch(0)).sum().backward()

        def fail(*args):
            raise KeyError("clean-up")

        with (
            mock.patch.object(CaptureSession, "capture", side_effect=ZeroDivisionError),
            mock.patch.object(_CudagraphGlobalRecord, "forget_graphs", fail),
            pytest.raises(ZeroDivisionError) as error,
        ):
            create_cudagraphs()
        assert error.value.__notes__ == ["What the failed capture left could not be cleaned up: 'clean-up'"]

    def test_refuses_layers_under_megatron_fsdp(self):
        model = stack(count=1)
        model.layers[0].linear.register_forward_pre_hook(runs_outside_graphs(lambda module, args: None))
        with pytest.raises(ValueError, match="--use-megatron-fsdp with --cuda-graph-impl local"):
            model(batch(0))

    def test_takes_layers_with_hooks_of_other_modules_of_this_distribution(self):
        model = stack(count=1)

        def hook(module, args):
            pass

        hook.__module__ = pool_of.__module__
        model.layers[0].linear.register_forward_pre_hook(hook)
        record(model)
        assert all(runner.cudagraph_created for runner in runners(model))

    def test_a_function_of_a_module_is_graphed_in_its_place(self):
        layer = Layer(graphs=False).cuda()
        use_graphable_rng()
        layer.manager = CudaGraphManager(layer.config, layer, "forward", pg_collection=groups())
        x = batch(0).requires_grad_()
        layer(x)[0].sum().backward()
        create_cudagraphs()
        before = layer.eager_calls
        assert torch.equal(layer(x)[0], layer.forward(x, eager=True)[0])
        assert layer.eager_calls == before + 1

    def test_capture_returns_time_and_memory(self):
        assert record(stack(count=1)).keys() == {"time", "allocated_bytes", "reserved_bytes"}

    def test_nothing_is_captured_where_nothing_was_recorded(self):
        assert create_cudagraphs() is None
        assert not _CudagraphGlobalRecord.cudagraph_created

    def test_delayed_weight_gradients_are_refused(self):
        model = stack(count=1)
        patch = mock.patch(
            "megatron.core.transformer._cuda_graphs.engine.slot.GraphedSlot.delays_weight_gradients",
            property(lambda _: True),
        )
        with patch, pytest.raises(ValueError, match="--delay-wgrad-compute"):
            record(model)
