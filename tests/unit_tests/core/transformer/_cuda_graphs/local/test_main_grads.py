"""main_grads: main gradients get what they get in eager mode, and nothing of warm-up."""

from typing import Any

import pytest
import torch

from megatron.core.transformer.cuda_graphs import create_cudagraphs, delete_cuda_graphs

from .local_graph_cases import HIDDEN, Layer, Stack, add_to_main_grad, batch, use_graphable_rng


@pytest.mark.usefixtures("cpu_backend", "no_graphs")
def test_gradients_are_added_in_the_precision_of_the_main_gradient():
    use_graphable_rng()
    layer = Layer().cuda()
    (runner,) = (layer(batch(0)), layer.cudagraph_manager.cudagraph_runners)[1]

    def param(**attributes):
        made: Any = torch.nn.Parameter(torch.zeros(2))
        vars(made).update(attributes)
        return made

    wide = param(main_grad=torch.ones(2, dtype=torch.float64))
    added = param(main_grad=torch.ones(2), grad_added_to_main_grad=True)
    sharded = param(main_grad=torch.ones(2), is_gtp_weight_remat=True)
    shared, without = param(main_grad=torch.ones(2)), param()
    runner.shared_params = (shared,)
    params = [wide, added, sharded, shared, without, wide]
    grad = torch.full((2,), 0.5)
    assert runner.take(params, [*[grad] * 5, None]) == [None, None, None, grad, grad, None]
    assert [param.main_grad.tolist() for param in params[:4]] == [[1.5, 1.5], [1, 1], [1, 1], [1, 1]]


class FusedProduct(torch.autograd.Function):
    """A product whose backward adds the weight's gradient to its main gradient, as fused kernels do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(grad.t() @ x)
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, 99.0)


class Fused(Layer):
    """A layer with a fused product."""

    def forward(self, hidden_states, scale=None, factor=1.0, **unused):
        return FusedProduct.apply(hidden_states, self.linear.weight) + self.linear.bias, None


@pytest.mark.usefixtures("cpu_backend")
def test_fused_gradients_are_added_once_in_each_pass_of_training():
    def steps(graphs):
        delete_cuda_graphs()
        torch.manual_seed(2)
        use_graphable_rng()
        layer = Fused(graphs=graphs).cuda()
        weight: Any = layer.linear.weight
        weight.main_grad = torch.zeros(HIDDEN, HIDDEN).cuda()
        main_grads = []
        for step in range(3):
            weight.grad_added_to_main_grad = False
            layer(batch(step).requires_grad_())[0].square().sum().backward()
            create_cudagraphs()
            main_grads.append(weight.main_grad.tolist())
        delete_cuda_graphs()
        return main_grads

    assert steps(graphs=True) == steps(graphs=False)


@pytest.mark.usefixtures("cpu_backend", "no_graphs")
class TestSharedParameters:
    """Autograd adds up the gradients of one backward pass before anything adds them to main gradients."""

    def train(self, layers, microbatches=3):
        model, found = Stack(layers).cuda(), []
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param)
            param.register_post_accumulate_grad_hook(add_to_main_grad)
        for step in range(3):
            for microbatch in range(microbatches):
                model(batch(step, microbatch)).square().mean().backward()
            create_cudagraphs()
            found += [param.main_grad.tolist() for param in model.parameters()]
        return found

    @pytest.mark.parametrize("kind", ["one layer twice", "one layer three times", "two layers with one weight"])
    def test_of_several_passes_through_them_train_as_eagerly(self, kind):
        def run(graphs):
            torch.manual_seed(5)
            use_graphable_rng()
            first, second = (Layer(i + 1, graphs) for i in range(2))
            second.linear.weight = first.linear.weight
            layers = {
                "one layer twice": [first, first],
                "one layer three times": [first, first, first],
                "two layers with one weight": [first, second],
            }
            return self.train(layers[kind])

        eager = run(graphs=False)
        assert run(graphs=True) == eager
