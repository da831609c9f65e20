"""Test that runners record the first step and replay it, with results equal to eager."""

import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import _cuda_graphs
from megatron.core.transformer.cuda_graphs import create_cudagraphs, delete_cuda_graphs

from .local_graph_cases import (
    Layer,
    Stack,
    add_to_main_grad,
    batch,
    eager_calls,
    record,
    runners,
    stack,
    train,
    use_graphable_rng,
)

pytestmark = pytest.mark.usefixtures("cpu_backend", "no_graphs")


def other_states() -> None:
    """Set RNG tracker states with a different seed, as loading a checkpoint does."""
    tracker = get_cuda_rng_tracker()
    states = {name: state.clone_state() for name, state in tracker.get_states().items()}
    for state in states.values():
        state.manual_seed(321)
    tracker.set_states(states)


class TestTraining:
    @pytest.mark.parametrize("reseed", [use_graphable_rng, other_states], ids=["another tracker", "other states"])
    def test_new_seed_takes_effect(self, reseed):
        traces = []
        for graphs in (False, True):
            model = stack(graphs=graphs, dropout=0.5)
            traces.append(train(model, steps=3))
            reseed()
            traces[-1] += train(model, steps=3)
        assert traces[0] == traces[1]

    @pytest.mark.parametrize("dropout", [0.0, 0.5])
    @pytest.mark.parametrize("microbatches", [1, 3])
    def test_training_equals_eager(self, dropout, microbatches):
        eager = train(stack(graphs=False, dropout=dropout), microbatches=microbatches)
        model = stack(dropout=dropout)
        assert train(model, microbatches=microbatches) == eager
        assert eager_calls(model) == [microbatches + 3] * 3  # the recorded step, two warm-up passes, and the capture

    def test_graphs_draw_from_current_generator_state(self):
        def losses(graphs):
            torch.manual_seed(5)
            torch.cuda.manual_seed(5)
            use_graphable_rng()
            model, found = Stack([DrawsFromCurrentState(graphs=graphs)]).cuda(), []
            for step in range(4):
                with get_cuda_rng_tracker().fork():  # like the decoder under sequence parallelism
                    loss = model(batch(step)).square().mean()
                loss.backward()
                create_cudagraphs()
                found += [loss.item(), torch.rand(2, device="cuda").tolist()]
            return found

        assert losses(graphs=True) == losses(graphs=False)

    def test_main_grad_is_added_inside_the_graph(self):
        def steps(graphs):
            model = stack(graphs=graphs)
            for param in model.parameters():
                param.main_grad = torch.ones_like(param)
                param.grad_added_to_main_grad = False
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


class DrawsFromCurrentState(Layer):
    """A layer that draws from the current generator state."""

    def forward(self, hidden_states, *args, **kwargs):
        dropped = torch.nn.functional.dropout(hidden_states, 0.5, self.training)
        return super().forward(dropped, *args, **kwargs)


def test_replay_sets_wgrad_ready_event():
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


def test_backward_after_deletion_is_refused():
    model = stack()
    record(model)
    loss = model(batch(1)).sum()
    delete_cuda_graphs()
    with pytest.raises(RuntimeError, match=r"layer 3 .*has no backward graph"):
        loss.backward()


class TestPythonCalls:
    """Test the host overhead of replays."""

    def count(self, run):
        """Return the number of calls of this package's functions during ``run``, and the result of ``run``."""
        package = str(Path(_cuda_graphs.__path__[0]))
        calls: Counter[str] = Counter()

        def note(frame, event, argument):
            if event == "call" and frame.f_code.co_filename.startswith(package):
                calls[frame.f_code.co_name] += 1

        sys.setprofile(note)
        try:
            result = run()
        finally:
            sys.setprofile(None)
        return calls.total(), result

    @pytest.mark.parametrize("pipeline", [1, 2])
    def test_replays_make_few_python_calls(self, pipeline):
        model = stack(count=4, pipeline=pipeline)
        record(model)
        model(batch(1)).sum().backward()
        forward, loss = self.count(lambda: model(batch(1, 1)).sum())
        backward, _ = self.count(lambda: loss.backward())
        assert 0 < forward <= 4 * 62  # 16 of these calls check for main gradients, which do not exist here
        assert 0 < backward <= 4 * 11


class TestStatus:
    def test_call_recorded_without_backward_is_refused(self):
        model = stack(count=1)
        model(batch(0))
        create_cudagraphs()
        (runner,) = runners(model)
        assert runner.fwd_graph is not None
        assert runner.bwd_graph is None
        with pytest.raises(RuntimeError, match="it was recorded without a backward pass"):
            model(batch(1))


class TestRefusals:
    def test_delayed_weight_gradients_are_refused(self):
        model = stack(count=1)
        patch = mock.patch(
            "megatron.core.transformer._cuda_graphs.engine.captured.GraphedCallable.delays_weight_gradients",
            property(lambda _: True),
        )
        with patch, pytest.raises(ValueError, match="--delay-wgrad-compute"):
            record(model)
