"""_CudaGraphRunner: what its graphs hold of the recorded step, and what cannot be captured."""

from unittest import mock

import pytest
import torch

from megatron.core.transformer.cuda_graphs import create_cudagraphs

from .local_graph_cases import HIDDEN, Layer, batch, record, recorded_runners, runners, stack, use_graphable_rng

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


class TestWarmUp:
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

    def test_looks_at_the_modules_that_run_in_the_first_pass_of_a_function_only(self):
        model = stack(count=1, pipeline=2)
        losses = [model(batch(0, microbatch)).sum() for microbatch in range(3)]
        for loss in reversed(losses):
            loss.backward()
        register = torch.nn.Module.register_forward_hook
        with mock.patch.object(torch.nn.Module, "register_forward_hook", autospec=True, side_effect=register) as hooks:
            create_cudagraphs()
        assert [call.args[0] for call in hooks.call_args_list] == list(model.layers[0].modules())


def test_its_graph_knows_the_state_of_the_recorded_pass_though_another_is_in_use_at_capture(monkeypatch):
    model = stack(count=1)
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    default.manual_seed(41)
    model(batch(0)).sum().backward()
    another = default.clone_state()
    another.manual_seed(42)
    default.graphsafe_set_state(another)
    seeds, register = [], torch.cuda.CUDAGraph.register_generator_state

    def note(graph, generator):
        seeds.append(generator.initial_seed())
        return register(graph, generator)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "register_generator_state", note)
    create_cudagraphs()
    assert 41 in seeds


class TestRefusals:
    def test_delayed_weight_gradients_are_refused(self):
        model = stack(count=1)
        patch = mock.patch(
            "megatron.core.transformer._cuda_graphs.engine.captured.GraphedCallable.delays_weight_gradients",
            property(lambda _: True),
        )
        with patch, pytest.raises(ValueError, match="--delay-wgrad-compute"):
            record(model)

    def test_a_parameter_of_another_module_is_refused(self):
        other = torch.nn.Linear(HIDDEN, HIDDEN).cuda()

        class Borrowing(Layer):
            def forward(self, hidden_states, *args, **kwargs):
                return super().forward(other(hidden_states), *args, **kwargs)

        use_graphable_rng()
        layer = Borrowing().cuda()
        layer(batch(0))[0].sum().backward()
        with pytest.raises(
            RuntimeError, match=r"layer 1 \(Borrowing\) uses a tensor of shape \(8,.*give it as an input"
        ):
            create_cudagraphs()


def test_connected_parameters_are_those_that_an_output_depends_on():
    model = stack(count=1)
    layer = model.layers[0]
    layer.unused = torch.nn.Linear(HIDDEN, HIDDEN)
    record(model)
    (runner,) = runners(model)
    assert runner.get_connected_params(layer.forward(batch(0))) == tuple(layer.linear.parameters())


def test_the_context_of_quantization_is_empty_without_it():
    runner, *_ = recorded_runners()
    with runner.get_quantization_context() as entered:
        assert entered is None


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
