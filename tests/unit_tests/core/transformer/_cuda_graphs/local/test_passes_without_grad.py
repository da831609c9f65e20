"""Test passes without gradients next to local graphs: evaluation, and log-probabilities in RL training."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from megatron.core.transformer.cuda_graphs import create_cudagraphs, delete_cuda_graphs
from megatron.core.transformer.utils import toggle_cuda_graphs

from .local_graph_cases import batch, eager_calls, record, runners, stack

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


def evaluate(model, *inputs, **kwargs):
    """Return the outputs of ``model`` in evaluation mode, without grad."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found = [model(each, **kwargs) for each in inputs]
    model.train(was_training)
    return [each.tolist() for each in found]


def step(model, number, microbatches=1, **kwargs):
    """Run one step of plain SGD, and return its losses."""
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


class TestEvaluation:
    def test_evaluation_runs_eagerly(self):
        model, reference = stack(), stack(graphs=False)
        record(model)
        before = eager_calls(model)
        with mock.patch.object(torch.cuda.CUDAGraph, "replay") as replay:
            for number in range(3):
                assert evaluate(model, batch(number)) == evaluate(reference, batch(number))
        assert eager_calls(model) == [count + 3 for count in before]
        replay.assert_not_called()

    @pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
    def test_evaluation_and_capture_without_grad_keep_gradients(self, mode):
        def run(graphs):
            model, found = stack(graphs=graphs), []
            for number in range(4):
                loss = model(batch(number)).square().mean()
                found.append(evaluate(model, batch(10 + number)))
                loss.backward()
                with mode():
                    create_cudagraphs()
                found.append([param.grad.tolist() for param in model.parameters()])
            return found

        eager = run(graphs=False)
        delete_cuda_graphs()
        assert run(graphs=True) == eager


class TestReinforcementLearning:
    """Test training steps that alternate with log-probability passes of the old policy and the reference policy."""

    @pytest.mark.parametrize(("mode", "pipeline"), [("train", 1), ("eval", 2)])
    def test_training_equals_eager(self, mode, pipeline):
        def run(graphs):
            model, found = stack(graphs=graphs, pipeline=pipeline, dropout=0.5), []
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
        # Up to capture: two log-probability passes, the first step, two warm-up passes and the capture
        of_first_step = 2 + 1 + 2 + 1
        assert graphed_calls == [of_first_step + 4] * 3
        assert calls == [9] * 3

    def test_pass_before_first_step_is_not_captured(self):
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
