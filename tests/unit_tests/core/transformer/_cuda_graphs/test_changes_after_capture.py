"""Test that changes after capture either give eager results or raise an error.

Each change is applied to a run with graphs and to the same run without, on one rank in this process.
"""

import functools
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.mlp import MLP
from tests.support.sample import each_once
from tests.support.trainings import models
from tests.unit_tests.core.distributed.captured_training import CapturedTraining, compared, graphed, short_batch
from tests.unit_tests.core.distributed.fsdp_variants import Variant

pytestmark = pytest.mark.usefixtures("side_stream")

SCOPES = {
    "model": graphed("model", dropout=0.1),
    "a layer": graphed("layer", dropout=0.1),
    "parts": graphed("layer", dropout=0.1, modules=("attn",)),
}


@pytest.fixture(params=SCOPES)
def scope(request):
    return SCOPES[request.param]


def middle(training):
    """Return a layer that is neither the first nor the last."""
    return training.layers[1]


def losses_of(training, step):
    """Return the loss of the first batch of ``step``."""
    return training._losses(training.chunks[0], next(training._batches(step))).float().mean()


def of_another_length(training, step):
    """Return the loss of a batch with shorter sequences."""
    *given, labels = short_batch(training, step)
    return training.chunks[0](*given, labels=labels).float().mean()


def changed_after(case, change, graphs):
    """Train, apply ``change``, train two more steps, and return the trace.

    If ``change`` returns a handle, remove it and train another step.
    """
    training = CapturedTraining(case, graphs)
    handle = None
    try:
        training.step()
        handle = change(training)
        training.step()
        training.step()
    finally:
        if handle is not None and hasattr(handle, "remove"):
            handle.remove()
            training.step()
        training.delete()
    return training.trace()


@functools.cache
def eagerly(case, change):
    """Return the trace of eager training, cached because it does not depend on the scope of graphs."""
    return changed_after(case, change, graphs=False)


def compare(case, change):
    """Train eagerly and with graphs, with ``change`` after the first step with graphs.

    Returns:
        The differences, and which graphs replay after the change: "replays" (all), "some" or "eagerly" (none).
    """
    graphed = changed_after(case, change, graphs=True)
    before, after = graphed.step_replays[1:3]
    outcome = "replays" if after == before else "some" if after else "eagerly"
    return eagerly(replace(case, modules=(), holds="model"), change).differences(graphed), outcome


def model_of(training):
    return training.fsdp.module


def another_optimizer(training):
    training.fsdp._replace_param_with_distributed_if_needed()  # as after each step
    training.optimizer = models.optimizer(training.case, training.chunks)
    training.optimizer.config.clip_grad = 0.25
    training._connect()


def other_weights(training):
    with torch.cuda.stream(training.stream), torch.no_grad():
        for param in (param for group in training.optimizer.param_groups for param in group["params"]):
            param.to_local().mul_(0.5)  # as when loading averaged weights
        training.fsdp.install_optimized_model_weights()


def other_forward(training):
    layer = middle(training)
    mlp = type(layer.mlp).forward
    layer.mlp.forward = lambda *args, **kwargs: tuple(
        out if out is None else out * 2 for out in mlp(layer.mlp, *args, **kwargs)
    )


def other_forward_of_the_layer(training):
    layer = middle(training)
    forward = type(layer).forward

    def doubled(*args, **kwargs):
        output, context = forward(layer, *args, **kwargs)
        return output * 2, context

    layer.forward = doubled


def doubling(module, args, output):
    return output * 2 if isinstance(module, torch.nn.LayerNorm) or "Norm" in type(module).__name__ else None


def doubling_first(module, args):
    return (args[0] * 2, *args[1:]) if "Norm" in type(module).__name__ else None


class Within:
    """A handle that enters a context, and exits it when removed."""

    def __init__(self, context):
        self._context = context
        self._context.__enter__()

    def remove(self):
        self._context.__exit__(None, None, None)


def half(tensor):
    return tensor * 0.5 if tensor.is_floating_point() else tensor


CHANGES = {
    "mode of a layer": lambda training: middle(training).eval(),
    "dropout of attention": lambda training: setattr(
        middle(training).self_attention.core_attention.attention_dropout, "p", 0.5
    ),
    "dropout of hidden states": lambda training: setattr(middle(training), "hidden_dropout", 0.5),
    "forward hook inside a layer": lambda training: middle(training).self_attention.linear_proj.register_forward_hook(
        lambda module, args, output: (output[0] * 2, output[1])
    ),
    "hook of a layer": lambda training: middle(training).register_forward_hook(
        lambda module, args, output: (output[0] * 2, output[1])
    ),
    "backward hook inside a layer": lambda training: middle(
        training
    ).self_attention.linear_proj.register_full_backward_hook(lambda module, given, got: (given[0] * 2, *given[1:])),
    "hook of a parameter": lambda training: middle(training).self_attention.linear_proj.weight.register_hook(
        lambda grad: grad * 2
    ),
    "forward of a part": other_forward,
    "forward of a layer": other_forward_of_the_layer,
    "hook of all modules": lambda training: register_module_forward_hook(doubling),
    "hook before all modules": lambda training: register_module_forward_pre_hook(doubling_first),
    "autocast": lambda training: Within(torch.autocast("cpu", torch.bfloat16)),
    "hooks of saved tensors": lambda training: Within(torch.autograd.graph.saved_tensors_hooks(half, half)),
    "activation function": lambda training: setattr(middle(training).mlp, "activation_func", torch.tanh),
    "hook of the output layer": lambda training: model_of(training).output_layer.register_forward_hook(
        lambda module, args, output: (output[0] * 2, output[1])
    ),
    "mode of the embedding": lambda training: model_of(training).embedding.eval(),
    "another optimizer": another_optimizer,
    "other weights": other_weights,
}


# Outcome per scope after a change: everything runs eagerly, some layers replay, or all graphs replay.
EAGERLY, ALWAYS = ("eagerly",) * 3, ("replays",) * 3
OUTCOMES = dict.fromkeys(CHANGES, ("eagerly", "some", "some")) | {
    "hook of a layer": ("eagerly", "replays", "replays"),
    "forward of a part": ("eagerly", "some", "replays"),
    "hook of all modules": EAGERLY,
    "hook before all modules": EAGERLY,
    "autocast": EAGERLY,
    "hooks of saved tensors": EAGERLY,
    "activation function": ("eagerly", "some", "replays"),
    "hook of the output layer": ("eagerly", "replays", "replays"),
    "mode of the embedding": ("eagerly", "replays", "replays"),
    "another optimizer": ALWAYS,
    "other weights": ALWAYS,
}


@pytest.mark.parametrize(("name", "of"), each_once(CHANGES, SCOPES))
def test_changed_training_equals_eager(one_rank, of, name):
    differences, outcome = compare(SCOPES[of], CHANGES[name])
    assert differences == []
    assert outcome == dict(zip(SCOPES, OUTCOMES[name], strict=True))[of]


@pytest.mark.parametrize("graphs", [False, True])
def test_frozen_parameter_is_an_error(one_rank, scope, graphs):
    training = CapturedTraining(scope, graphs)
    training.fsdp._replace_param_with_raw_if_needed()  # as in each pass
    middle(training).self_attention.linear_proj.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"requires_grad of \S*linear_proj\.weight is off"):
        training.step()
    training.delete()


def replay_then_eager(training):
    first, second = losses_of(training, 7), of_another_length(training, 8)
    second.backward()
    first.backward()


def eager_then_replay(training):
    first, second = of_another_length(training, 7), losses_of(training, 8)
    second.backward()
    first.backward()


def evaluation_mode_in_between(training):
    loss = losses_of(training, 7)
    training.chunks[0].eval()
    loss.backward()
    training.chunks[0].train()


def evaluation_pass_in_between(training):
    loss = losses_of(training, 7)
    training.chunks[0].eval()
    with torch.no_grad():
        losses_of(training, 8)
    training.chunks[0].train()
    loss.backward()


PASSES = [replay_then_eager, eager_then_replay, evaluation_mode_in_between, evaluation_pass_in_between]


@pytest.mark.parametrize(("passes", "of"), each_once(PASSES, SCOPES))
def test_backward_pass_replays_only_if_its_forward_pass_did(one_rank, of, passes):
    def gradients(graphs):
        training = CapturedTraining(SCOPES[of], graphs)
        with torch.cuda.stream(training.stream):
            training.fsdp.zero_grad_buffer()
            passes(training)
            training.fsdp.finish_grad_sync()
        training.delete()
        return [group.main_grad_buffer.data for group in training.fsdp.param_and_grad_buffer.parameter_groups]

    eager, replayed = gradients(False), gradients(True)
    assert any(each.any() for each in eager)
    assert all(map(torch.equal, replayed, eager))


def test_mixed_backward_pass_is_refused(one_rank, scope):
    training = CapturedTraining(scope)
    with torch.cuda.stream(training.stream):
        loss = losses_of(training, 7) + of_another_length(training, 8)
        with pytest.raises(RuntimeError, match=r"(?i)call backward\(\) for each loss separately"):
            loss.backward()
    training.delete()


class HookedBefore(CapturedTraining):
    """Registers a parameter hook before capture."""

    def capture(self, capture):
        self.fsdp._replace_param_with_raw_if_needed()
        CHANGES["hook of a parameter"](self)
        super().capture(capture)


def test_parameter_hooks_from_before_capture_run(one_rank, scope):
    if scope is SCOPES["model"]:  # requested, but rejected because of its hooks
        scope = SCOPES["a layer"]

    def hook_eager_training(training):
        if training.helper is None and len(training.losses) == 1:
            CHANGES["hook of a parameter"](training)

    assert compared(scope, hook_eager_training, kind=HookedBefore).replays > 0


def dropping_out(training):
    """Evaluate with dropout in the first layer, as in Monte Carlo dropout."""
    training.chunks[0].eval()
    for module in training.layers[0].modules():
        if isinstance(module, torch.nn.Dropout):
            module.train()
    with torch.no_grad(), torch.cuda.stream(training.stream):
        training.evaluations.append([losses_of(training, 7).item()])
    training.chunks[0].train()


def evaluated_with_a_hook(training):
    handle = CHANGES["forward hook inside a layer"](training)
    training.evaluate()
    handle.remove()


@pytest.mark.parametrize(
    ("change", "scope"), each_once([dropping_out, evaluated_with_a_hook], SCOPES), indirect=["scope"]
)
def test_change_in_evaluation_is_noticed(one_rank, scope, change):
    def evaluate(training):
        training.evaluate()  # the first evaluation captures
        change(training)
        training.evaluate()

    assert compare(scope, evaluate)[0] == []


def saved_states(training):
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name: state.clone_state() for name, state in tracker.get_states().items()})


def other_seed(training):
    model_parallel_cuda_manual_seed(99, use_cudagraphable_rng=True, force_reset_rng=True)


@pytest.mark.parametrize(("change", "scope"), each_once([saved_states, other_seed], SCOPES), indirect=["scope"])
def test_graphs_use_new_states_of_rng_tracker(one_rank, scope, change):
    assert compare(scope, change)[0] == []


class Shifted(MLP):
    """Adds a buffer to the output."""

    def forward(self, hidden_states, **others):
        output, bias = super().forward(hidden_states, **others)
        return output + self.shift, bias


def with_a_buffer(model):
    for layer in model.decoder.layers:
        layer.mlp.__class__ = Shifted
        layer.mlp.register_buffer("shift", torch.zeros(1, device="cuda"))


@pytest.mark.parametrize("scope", [SCOPES["model"], SCOPES["a layer"]], ids=["model", "a layer"])
def test_buffer_replaced_between_microbatches_is_noticed(one_rank, scope):
    def trace(graphs):
        case = replace(scope, microbatches=2) if graphs else replace(scope, microbatches=2, holds="model")
        training = CapturedTraining(case, graphs, Variant(case, change=with_a_buffer))
        mlp, losses, calls = middle(training).mlp, training._losses, itertools.count()
        buffers = mlp.shift, torch.ones(1, device="cuda")

        def exchanging(*given):
            mlp.shift = buffers[next(calls) % 2]
            return losses(*given)

        with mock.patch.object(training, "_losses", exchanging):
            training.step()
            training.step()
        mlp.shift = buffers[0]
        training.delete()
        return training.trace()

    eager, graphed = trace(False), trace(True)
    assert eager.differences(graphed) == []
    assert graphed.step_replays[-1]
