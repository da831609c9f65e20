"""_CudaGraphRunner: layers are recorded in the first step, replayed from the second, and compute as eagerly."""

import pytest
import torch

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.cuda_graphs import (
    create_cudagraphs,
)

from .local_graph_cases import (
    HIDDEN,
    Layer,
    Stack,
    add_to_main_grad,
    batch,
    eager_calls,
    record,
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


class DrawsWhereItIs(Layer):
    """Draws from the generator state that is in use around it."""

    def forward(self, hidden_states, *args, **kwargs):
        dropped = torch.nn.functional.dropout(hidden_states, 0.5, self.training)
        return super().forward(dropped, *args, **kwargs)


class _Scaled(Stack):
    """Every layer has a scale of its own, and something eager behind it."""

    def forward(self, x, *, scales=(), **kwargs):
        x = self.before(x)
        for layer, scale in zip(self.layers, scales, strict=True):
            x, _ = layer(x, scale=scale, **kwargs)
            x = x * 1.5
        return self.after(x)
