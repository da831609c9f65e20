"""Graphs of training in passes without gradients: evaluation, and log-probabilities of reinforcement learning."""

from typing import Any

import pytest
import torch

from megatron.core.transformer.cuda_graphs import create_cudagraphs, delete_cuda_graphs
from megatron.core.transformer.utils import toggle_cuda_graphs

from .local_graph_cases import Layer, Stack, batch, eager_calls, record, runners, stack, use_graphable_rng

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


def evaluate(model, *inputs, **kwargs):
    """Outputs of ``model`` in evaluation mode, without grad, each kept while the next is computed."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found = [model(each, **kwargs) for each in inputs]
    model.train(was_training)
    return [each.tolist() for each in found]


def step(model, number, microbatches=1, **kwargs):
    """One step of plain SGD; returns its losses."""
    losses = []
    for microbatch in range(microbatches):
        loss = model(batch(number, microbatch), **kwargs).square().mean()
        loss.backward()
        losses.append(loss.item())
    create_cudagraphs()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
            param.grad = None
    return losses


class Counting(Layer):
    """Counts its training passes with grad, as a router counts tokens of each expert."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, hidden_states, *args, **kwargs):
        if torch.is_grad_enabled():
            self.count += 1
        return super().forward(hidden_states, *args, **kwargs)


def counting_stack(graphs, **options):
    torch.manual_seed(5)
    use_graphable_rng()
    return Stack([Counting(i + 1, graphs, **options) for i in range(2)]).cuda()


class TestEvaluation:
    def test_is_compared_once_and_replayed_then(self):
        model, reference = stack(), stack(graphs=False)
        record(model)
        before = eager_calls(model)
        for number in range(3):
            assert evaluate(model, batch(number)) == evaluate(reference, batch(number))
        assert eager_calls(model) == [count + 1 for count in before]

    def test_runs_eagerly_where_training_drops_out(self):
        model, reference = stack(dropout=0.5), stack(graphs=False, dropout=0.5)
        record(model)
        before, random = eager_calls(model), torch.cuda.get_rng_state()
        for number in range(3):
            assert evaluate(model, batch(number)) == evaluate(reference, batch(number))
        assert eager_calls(model) == [count + 3 for count in before]
        assert torch.equal(torch.cuda.get_rng_state(), random)

    def test_runs_eagerly_where_training_draws_without_effect(self):
        class Drawing(Layer):
            def forward(self, hidden_states, *args, **kwargs):
                if self.training:
                    torch.rand_like(hidden_states)
                return super().forward(hidden_states, *args, **kwargs)

        use_graphable_rng()
        model = Stack([Drawing()]).cuda()
        record(model)
        before, random = eager_calls(model), torch.cuda.get_rng_state()
        for number in range(3):
            evaluate(model, batch(number))
        assert eager_calls(model) == [before[0] + 3]
        assert torch.equal(torch.cuda.get_rng_state(), random)

    def test_runs_eagerly_where_training_changes_buffers(self):
        model = counting_stack(graphs=True)
        record(model)
        counts = [layer.count.item() for layer in model.layers]
        evaluate(model, batch(1), batch(2))
        assert [layer.count.item() for layer in model.layers] == counts

    def test_runs_eagerly_on_another_shape(self):
        model, reference = stack(), stack(graphs=False)
        record(model)
        for size in (3, 3, 5, 3):
            assert evaluate(model, batch(1, size=size)) == evaluate(reference, batch(1, size=size))

    def test_runs_eagerly_without_its_graph(self):
        model = stack(count=1)
        record(model)
        evaluate(model, batch(0))
        calls = eager_calls(model)
        del runners(model)[0].fwd_graph
        evaluate(model, batch(1))
        assert eager_calls(model) == [calls[0] + 1]

    def test_runs_eagerly_with_grad(self):
        model = stack()
        record(model)
        evaluate(model, batch(0))
        calls = eager_calls(model)
        model.eval()
        model(batch(1)).sum().backward()
        assert eager_calls(model) == [count + 1 for count in calls]

    def test_runs_eagerly_under_autocast(self):
        model, reference = stack(), stack(graphs=False)
        record(model)
        evaluate(model, batch(0))
        with torch.autocast(batch(0).device.type, dtype=torch.bfloat16):
            assert evaluate(model, batch(1)) == evaluate(reference, batch(1))

    @pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
    def test_runs_eagerly_under_hooks_of_modules(self, register):
        model, seen = stack(), []
        record(model)
        evaluate(model, batch(0))
        handle = getattr(model.layers[1].linear, register)(lambda module, *values: seen.append(values[-1]))
        evaluate(model, batch(1), batch(2))
        handle.remove()
        evaluate(model, batch(3))
        assert len(seen) == 2

    def test_runs_eagerly_on_parameters_that_were_swapped(self):
        model, reference = stack(), stack(graphs=False)
        record(model)
        evaluate(model, batch(0), batch(1))
        weight, other = model.layers[1].linear.weight, reference.layers[1].linear.weight
        trained = weight.data
        for _ in range(2):
            weight.data = torch.ones_like(trained)
            other.data = weight.data.clone()
            assert evaluate(model, batch(2)) == evaluate(reference, batch(2))
            weight.data = trained
            other.data = trained.clone()
            assert evaluate(model, batch(2)) == evaluate(reference, batch(2))

    def test_before_a_backward_pass_leaves_what_it_needs(self):
        def run(graphs):
            model, found = stack(graphs=graphs), []
            for number in range(4):
                loss = model(batch(number)).square().mean()
                found.append(evaluate(model, batch(10 + number)))
                loss.backward()
                create_cudagraphs()
                found.append([param.grad.tolist() for param in model.parameters()])
            return found

        eager = run(graphs=False)
        delete_cuda_graphs()
        assert run(graphs=True) == eager

    def test_between_backward_passes_runs_eagerly(self):
        def run(graphs):
            model, found = stack(count=2, graphs=graphs, pipeline=2), []
            for number in range(3):
                first, second = (model(batch(number, microbatch)).square().mean() for microbatch in range(2))
                first.backward()
                found.append(evaluate(model, batch(10 + number)))
                second.backward()
                create_cudagraphs()
                found.append([param.grad.tolist() for param in model.parameters()])
            return found

        eager = run(graphs=False)
        delete_cuda_graphs()
        assert run(graphs=True) == eager

    def test_outputs_that_no_graph_reads_outlive_the_next_replay(self):
        model, reference = stack(), stack(graphs=False)
        model.after, reference.after = torch.nn.Identity(), torch.nn.Identity()
        record(model)
        for number in range(2):
            inputs = [batch(number, i) for i in range(3)]
            assert evaluate(model, *inputs) == evaluate(reference, *inputs)

    def test_in_a_pipeline_leaves_the_order_of_runners_as_it_was(self):
        def run(graphs):
            model, found = stack(graphs=graphs, pipeline=2), []
            for number in range(4):
                losses = [model(batch(number, microbatch)).square().mean() for microbatch in range(3)]
                for loss in losses:
                    loss.backward()
                    found.append(loss.item())
                create_cudagraphs()
                found.append(evaluate(model, batch(10 + number)))
            return found

        eager = run(graphs=False)
        delete_cuda_graphs()
        assert run(graphs=True) == eager


class TestWithoutGradInTraining:
    def test_a_pass_is_replayed(self):
        model, reference = stack(), stack(graphs=False)
        record(model)
        before = eager_calls(model)
        with torch.no_grad():
            assert torch.equal(model(batch(1)), reference(batch(1)))
        assert eager_calls(model) == before

    def test_a_pass_runs_eagerly_where_only_grad_changes_buffers(self):
        def run(graphs):
            model, found = counting_stack(graphs), []
            for number in range(4):
                found += step(model, number)
                with torch.no_grad():
                    found.append(model(batch(10 + number)).tolist())
                create_cudagraphs()
            return found, [layer.count.item() for layer in model.layers]

        eager = run(graphs=False)
        delete_cuda_graphs()
        assert run(graphs=True) == eager

    def test_a_pass_is_refused_while_a_backward_pass_is_to_come(self):
        model = stack(count=1)
        record(model)
        loss = model(batch(1)).sum()
        with torch.no_grad(), pytest.raises(RuntimeError, match="it waits for its backward pass"):
            model(batch(2))
        loss.backward()


class TestReinforcementLearning:
    """Log-probabilities of the old and the reference policy, then steps, again and again."""

    @pytest.mark.parametrize("mode", ["train", "eval"])
    @pytest.mark.parametrize("pipeline", [1, 2])
    @pytest.mark.parametrize("dropout", [0.0, 0.5])
    def test_trains_bit_for_bit_as_eager(self, mode, pipeline, dropout):
        def run(graphs):
            model, found = stack(graphs=graphs, pipeline=pipeline, dropout=dropout), []
            first_weights = {name: value.clone() for name, value in model.state_dict().items()}
            for number in range(3):
                for weights in (None, first_weights):
                    trained = {name: value.clone() for name, value in model.state_dict().items()}
                    if weights is not None:
                        model.load_state_dict(weights)
                    model.train(mode == "train")
                    with torch.no_grad():
                        found.append(model(batch(100 + number)).tolist())
                    create_cudagraphs()
                    model.train()
                    model.load_state_dict(trained)
                found += step(model, number)
            return found, eager_calls(model)

        eager, calls = run(graphs=False)
        delete_cuda_graphs()
        graphed, graphed_calls = run(graphs=True)
        assert graphed == eager
        # Before the first step both log-probabilities, the step itself, two to warm up and the capture; then, in
        # evaluation mode, one pass that is compared.
        if mode == "train":
            assert graphed_calls == [2 + 1 + 2 + 1] * 3
        elif not dropout:
            assert graphed_calls == [2 + 1 + 2 + 1 + 1] * 3
        assert calls == [9] * 3

    def test_a_pass_without_grad_before_the_first_step_is_not_captured(self):
        model = stack()
        with torch.no_grad():
            model(batch(0))
        assert create_cudagraphs() is None
        assert not runners(model)
        step(model, 0)
        assert all(runner.bwd_graph is not None for runner in runners(model))

    def test_graphs_can_be_toggled(self):
        model = stack(count=1)
        model.config = model.layers[0].config
        model.config.recompute_granularity = None
        record(model)
        calls = eager_calls(model)
        model.eval()
        toggle_cuda_graphs(model, "none")
        with torch.no_grad():
            model(batch(0))
        assert eager_calls(model) == [calls[0] + 1]
        model.train()
        toggle_cuda_graphs(model, "local")
        model(batch(1)).sum().backward()
        assert eager_calls(model) == [calls[0] + 1]
