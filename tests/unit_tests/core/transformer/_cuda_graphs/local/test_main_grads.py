"""main_grads: main gradients get what they get in eager mode, and nothing of warm-up."""

from typing import Any

import pytest
import torch

from megatron.core.transformer._cuda_graphs.local.runner import accumulate_into_main_grads
from megatron.core.transformer.cuda_graphs import CudaGraphManager, create_cudagraphs, delete_cuda_graphs

from .local_graph_cases import HIDDEN, Layer, Stack, add_to_main_grad, batch, groups, use_graphable_rng


def param(main_grad=None, added: bool | None = None) -> Any:
    made: Any = torch.nn.Parameter(torch.zeros(2))
    if main_grad is not None:
        made.main_grad = torch.full((2,), main_grad)
    if added is not None:
        made.grad_added_to_main_grad = added
    return made


def test_gradients_are_added_in_the_precision_of_the_main_gradient():
    target = param(1.0)
    target.main_grad = torch.ones(2, dtype=torch.float64)
    assert accumulate_into_main_grads([target], [torch.full((2,), 0.5)], ()) == [None]
    assert target.main_grad.tolist() == [1.5, 1.5]
    assert target.main_grad.dtype is torch.float64


def test_what_the_layer_has_added_itself_is_not_added_again():
    target = param(1.0, added=True)
    assert accumulate_into_main_grads([target], [torch.ones(2)], ()) == [None]
    assert target.main_grad.tolist() == [1, 1]


def test_the_gradient_of_a_sharded_weight_is_not_added():
    target = param(1.0)
    target.is_gtp_weight_remat = True  # megatron-core's mark of a weight that adds its own
    assert accumulate_into_main_grads([target], [torch.ones(2)], ()) == [None]
    assert target.main_grad.tolist() == [1, 1]


def test_a_gradient_without_a_main_gradient_is_left():
    grad = torch.ones(2)
    assert accumulate_into_main_grads([param()], [grad], ())[0] is grad


def test_no_gradient_is_nothing_to_add():
    target = param(1.0)
    assert accumulate_into_main_grads([target, param()], [None, None], ()) == [None, None]
    assert target.main_grad.tolist() == [1, 1]


def test_gradients_of_shared_parameters_are_left_unless_the_layer_has_added_them():
    shared, added, own = param(1.0), param(1.0, added=True), param(1.0)
    grad = torch.ones(2)
    left = accumulate_into_main_grads([shared, added, own], [grad] * 3, shared=[shared, added])
    assert left == [grad, None, None]
    assert [each.main_grad.tolist() for each in (shared, added, own)] == [[1, 1], [1, 1], [2, 2]]


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

    def test_are_not_those_that_two_graphs_of_one_layer_use_apart(self):
        class Halves(Layer):
            def __init__(self):
                super().__init__(graphs=False)
                self.second = torch.nn.Linear(HIDDEN, HIDDEN)
                for name in ("begin", "end"):
                    setattr(self, f"manager_{name}", CudaGraphManager(self.config, self, name, pg_collection=groups()))

            def begin(self, x):
                return self.linear(x)

            def end(self, x):
                return self.second(x)

            def forward(self, hidden_states, *args, **kwargs):
                return self.end(self.begin(hidden_states).relu()), None

        use_graphable_rng()
        layer = Halves()
        self.train([layer], microbatches=1)
        (first,), (second,) = (manager.cudagraph_runners for manager in (layer.manager_begin, layer.manager_end))
        assert [runner.shared_params for runner in (first, second)] == [(), ()]
        assert first.params_to_backprop == tuple(layer.linear.parameters())

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
