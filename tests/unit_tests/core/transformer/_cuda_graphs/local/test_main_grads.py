"""Test that main gradients with local graphs equal eager main gradients."""

from typing import Any

import pytest
import torch

from megatron.core.transformer.cuda_graphs import create_cudagraphs, delete_cuda_graphs

from .local_graph_cases import HIDDEN, Layer, Stack, add_to_main_grad, batch, use_graphable_rng


class FusedProduct(torch.autograd.Function):
    """A product whose backward adds the weight's gradient to its main gradient, like fused kernels."""

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
def test_fused_gradients_are_added_once_per_pass():
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
@pytest.mark.parametrize("kind", ["one layer three times", "two layers with one weight"])
def test_gradients_of_shared_parameters_equal_eager(kind):
    def run(graphs):
        torch.manual_seed(5)
        use_graphable_rng()
        first, second = (Layer(i + 1, graphs) for i in range(2))
        second.linear.weight = first.linear.weight
        model = Stack([first] * 3 if kind == "one layer three times" else [first, second]).cuda()
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param)
            param.register_post_accumulate_grad_hook(add_to_main_grad)
        found = []
        for step in range(3):
            for microbatch in range(3):
                model(batch(step, microbatch)).square().mean().backward()
            create_cudagraphs()
            found += [param.main_grad.tolist() for param in model.parameters()]
        return found

    eager = run(graphs=False)
    assert run(graphs=True) == eager
