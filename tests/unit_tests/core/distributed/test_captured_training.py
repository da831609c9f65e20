"""Test that training with graphs under Megatron-FSDP is bit-identical to eager training.

These tests run in this process, with one rank. The integration tests use two ranks.
"""

import gc
import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import tee
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from megatron.core.optimizer.local_shards import local_tensor
from megatron.core.transformer._cuda_graphs.errors import ChangedSinceCaptureError
from megatron.core.transformer._cuda_graphs.layer_graph import LayerGraph
from megatron.core.transformer._cuda_graphs.te import attached_graphs, capture_state
from tests.support.sample import each_once
from tests.support.trainings.training import train

from .captured_training import CapturedTraining, captured, compared, graphed, in_use, occupied, short_batch, trained
from .fsdp_variants import Variant, run_backward

pytestmark = pytest.mark.sampled

MODEL, ONE = "model", "layer"  # scope of a graph
REPLAYS = {MODEL: 2, ONE: 6}  # per step with three layers


class Unused(torch.nn.Module):
    """A wrapper module with an unused parameter."""

    def __init__(self, module):
        super().__init__()
        self.module, self.unused = module, torch.nn.Parameter(torch.ones(5))

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def add_unused(model):
    for layer in model.decoder.layers:
        layer.mlp = Unused(layer.mlp)


@pytest.mark.parametrize("holds", [MODEL, ONE])
def test_unused_parameters_train_bit_identically(one_rank, holds):
    case = graphed(holds)
    assert compared(case, variant=Variant(case, change=add_unused)).replays == REPLAYS[holds]


def share_weights(model):
    """Share a weight between the first and third layer, and a bias between the second and third."""
    first, second, third = model.decoder.layers
    third.mlp.linear_fc1.weight = first.mlp.linear_fc1.weight
    third.self_attention.linear_proj.bias = second.self_attention.linear_proj.bias


@pytest.mark.parametrize("modules", [(), ("attn",)])
def test_shared_parameters_train_bit_identically(one_rank, modules):
    case = graphed(ONE, modules=modules, microbatches=2)
    assert compared(case, variant=Variant(case, change=share_weights)).replays == 2 * REPLAYS[ONE]


@pytest.mark.parametrize("modules", [(), ("attn",)])
def test_autograd_grad_through_replays_is_refused(one_rank, modules):
    case = graphed(ONE, modules=modules)
    training = CapturedTraining(case)
    batch = next(training._batches(1))
    embedded = torch.zeros(case.sequence, case.micro_batch, case.hidden, requires_grad=True)
    losses = training.chunks[0](batch.tokens, batch.positions, batch.mask, labels=batch.labels, decoder_input=embedded)
    with pytest.raises(RuntimeError, match=r"layer 3.*: torch\.autograd\.grad or .*--cuda-graph-impl none"):
        torch.autograd.grad(losses.mean(), embedded)
    training.delete()


def note_calls(calls, model):
    """Register hooks of every kind on each layer that append their tensors to ``calls``."""

    def noting(kind):
        def hook(layer, *call):
            tensors = [leaf.clone() for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]
            calls.append((kind, layer.layer_number, tensors))

        return hook

    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(noting("before forward"), with_kwargs=True)
        layer.register_forward_hook(noting("after forward"), with_kwargs=True)
        layer.register_full_backward_pre_hook(noting("before backward"))
        layer.register_full_backward_hook(noting("after backward"))


@pytest.mark.parametrize("modules", [(), ("attn",)])
def test_layer_hooks_see_eager_calls_and_values(one_rank, modules):
    case = graphed(ONE, modules=modules, microbatches=2)
    expected: list = []
    calls: list = []
    eager = trained(case, False, variant=Variant(case, change=partial(note_calls, expected)))
    graphs = trained(case, True, variant=Variant(case, change=partial(note_calls, calls)))
    assert eager.differences(graphs) == []
    assert graphs.replays == 2 * REPLAYS[ONE]
    assert len(expected) == 3 * 2 * 3 * 4  # steps, micro-batches, layers, kinds
    assert [call[:2] for call in calls] == [call[:2] for call in expected]
    for (*_, mine), (*_, theirs) in zip(calls, expected, strict=True):
        assert all(map(torch.equal, mine, theirs)) and len(mine) == len(theirs)


def stepped_twice(training):
    """Run the optimizer a second time with the same gradients."""
    if len(training.losses) > 1:  # a capture zeroes gradients
        with torch.cuda.stream(training.stream):
            training.optimizer.step()


def stepped_twice_with_nothing_gathered(training):
    training.fsdp.synchronize_param_gather()
    stepped_twice(training)


@pytest.mark.parametrize(
    ("graphs", "case"),
    [(False, graphed(MODEL)), (True, graphed(MODEL)), (True, graphed(ONE))],
    ids=["eagerly", "model", "a layer"],
)
def test_weights_of_a_second_optimizer_step_are_used(one_rank, graphs, case):
    expected = trained(case, False, stepped_twice_with_nothing_gathered)
    assert expected.differences(trained(case, graphs, stepped_twice)) == []


def evaluate_in_turn(training):
    """Evaluate with the training shape and a shorter one, in a different order at each step."""
    (chunk,) = training.chunks
    batch = next(training._batches(9))
    whole = batch.tokens, batch.positions, batch.mask, batch.labels
    short = short_batch(training, 7)
    orders = [(whole, short), (short, whole, whole), (short,), (whole,)]
    chunk.eval()
    with torch.cuda.stream(training.stream), torch.no_grad():
        for *given, labels in orders[len(training.losses) % 4]:
            training.evaluations.append(chunk(*given, labels=labels).tolist())
    chunk.train()


@pytest.mark.parametrize("holds", [MODEL, ONE])
def test_evaluation_of_two_shapes_in_any_order_is_identical(one_rank, holds):
    graphs = compared(graphed(holds, dropout=0.1), evaluate_in_turn, steps=6)
    assert graphs.replays == REPLAYS[holds]
    assert len(graphs.evaluations) == 11


@contextmanager
def failing(layer, in_backward):
    """Make captures of ``layer`` fail in this context, with a hook that reads a tensor on the host."""

    def read(tensor):
        tensor.sum().item()

    def hook(module, args, output):
        tensor = output[0] if isinstance(output, tuple) else output
        if in_backward:
            tensor.register_hook(lambda grad: (read(grad), None)[1])
        else:
            read(tensor)

    handle = layer.mlp.register_forward_hook(hook)
    yield
    handle.remove()


@pytest.mark.parametrize(("holds", "in_backward"), each_once([MODEL, ONE], [False, True]))
def test_training_and_capture_continue_after_a_failed_capture(one_rank, in_backward, holds):
    case = graphed(holds, dropout=0.1)

    def fail_and_capture(training):
        if training.helper is None or len(training.losses) != 2:
            return
        training.helper.delete_cuda_graphs()
        with (
            failing(training.layers[0], in_backward),
            pytest.raises(RuntimeError, match="when stream is capturing"),
        ):
            training.capture(lambda training: training.helper.create_cudagraphs())
        graphs = training.fsdp.graphs
        assert (graphs.layers, graphs.whole_passes, graphs.captured) == ({}, None, None)
        assert in_use(training.fsdp) == [{}, {}]
        training.step()
        assert training.replayed == []
        training.capture(torch.inference_mode()(lambda training: training.helper.create_cudagraphs()))

    eager = trained(case, False, steps=4)
    graphs = trained(case, True, between=fail_and_capture, steps=3)
    assert eager.differences(graphs) == []
    assert graphs.replays == REPLAYS[holds]


@pytest.mark.parametrize("loss_outside", [False, True])
@pytest.mark.parametrize("holds", [None, MODEL])
def test_calls_unlike_captured_ones_run_eagerly(one_rank, holds, loss_outside):
    def alternate(training):
        training.case = replace(training.case, loss_outside=not training.case.loss_outside)

    case = graphed(holds, loss_outside=loss_outside, microbatches=2)
    assert compared(case, alternate, steps=4).step_replays[1:] == [0, 4, 0, 4]


@pytest.mark.parametrize("loss_outside", [False, True])
def test_outputs_outlive_the_next_replay(one_rank, loss_outside):
    training = CapturedTraining(graphed(MODEL, loss_outside=loss_outside))
    kept = []
    training.chunks[0].register_forward_hook(lambda module, args, output: kept.append(output))
    training.step()
    (before,) = [tensor.detach().clone() for tensor in kept]
    training.step()
    training.delete()
    assert torch.equal(kept[0], before)
    assert not torch.equal(kept[1], before)


def test_rotary_embeddings_may_leave_their_cache(one_rank):
    def forget(training):
        type(training.fsdp.module.rotary_pos_emb).forward.cache_clear()

    assert compared(graphed(MODEL), forget).replays == REPLAYS[MODEL]


def test_layers_are_captured_if_the_model_cannot_be(one_rank, monkeypatch, caplog):
    def fails(*args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(capture_state, "capture_models", fails)
    case = replace(graphed(None, dropout=0.1), warmup=1, steps=3)
    eager, graphs = train(case, False), train(case, True)
    assert eager.differences(graphs) == []
    assert graphs.replays == REPLAYS[ONE]
    (warning,) = [record.message for record in caplog.records if "Capturing its layers instead" in record.message]
    assert "no such kernel" in warning


@pytest.mark.parametrize(
    ("holds", "modules", "named"),
    [
        (MODEL, (), "decoder.layers.1.mlp"),
        (ONE, (), "layer 2 (TransformerLayer).mlp"),
        (ONE, ("attn",), ""),
    ],
)
def test_warning_names_skipped_hooks(one_rank, caplog, holds, modules, named):
    called = []
    hooked = Variant(
        case := graphed(holds, modules=modules),
        change=lambda model: model.decoder.layers[1].mlp.register_forward_hook(lambda *call: called.append(1)) and None,
    )
    training = CapturedTraining(case, variant=hooked)
    called.clear()
    training.step()
    training.delete()
    warnings = [record.message for record in caplog.records if "are part of CUDA graphs" in record.message]
    assert [f"hooks of {named} are part of CUDA graphs" in warning for warning in warnings] == [True] * bool(named)
    assert bool(called) is not bool(named)


def test_gradients_of_a_synchronized_replay_are_attached(one_rank):
    training = CapturedTraining(graphed(MODEL))
    training.step()
    with torch.cuda.stream(training.stream):
        training.fsdp.zero_grad_buffer()
        training.optimizer.zero_grad()
        with training.fsdp.sync():
            training._losses(training.chunks[0], next(training._batches(7))).float().mean().backward()
    params = [param for group in training.optimizer.param_groups for param in group["params"]]
    assert params and all(param.grad is not None for param in params)
    training.delete()


@pytest.mark.parametrize(("kind", "what"), [("model_weight_buffer", "parameters"), ("main_grad_buffer", "gradients")])
def test_replaced_memory_of_unsharded_buckets_is_an_error(one_rank, kind, what):
    training = CapturedTraining(graphed(MODEL))
    groups = training.fsdp.param_and_grad_buffer.parameter_groups
    buffer = next(getattr(group, kind) for group in groups if group.fsdp_unit_id is not None)
    buffer.data = buffer.data.clone()
    with pytest.raises(ChangedSinceCaptureError, match=f"{what} of bucket"):
        training.step()
    training.delete()


def test_moved_buckets_of_the_communication_dtype_are_an_error(one_rank):
    case = graphed(MODEL)
    training = CapturedTraining(case, variant=Variant(case, sharding={"megatron_fsdp_grad_comm_dtype": torch.bfloat16}))
    with (
        occupied(training.fsdp, "main_grad_buffer"),
        pytest.raises(ChangedSinceCaptureError, match="gradients of bucket"),
    ):
        training.step()
    training.delete()


def test_failure_after_capture_leaves_no_layer_with_graphs(one_rank, monkeypatch):
    """Check the cleanup if an error occurs after some layers have received graphs."""
    made = []

    def second_fails(*args, **kwargs):
        made.append(args)
        if len(made) == 2:
            raise RuntimeError("no more graphs")
        return LayerGraph(*args, **kwargs)

    training = CapturedTraining(graphed(ONE))
    training.delete()
    monkeypatch.setattr(attached_graphs, "LayerGraph", second_fails)
    training.helper.config.cuda_graph_fallback = "eager"
    training.capture(lambda training: training.helper.create_cudagraphs())
    assert len(made) == 2
    assert not any(layer.cuda_graphs for layer in training.helper.flattened_callables)
    assert training.fsdp.graphs.layers == {}
    training.step()
    assert in_use(training.fsdp) == [{}, {}]


def graphs_alive() -> int:
    """Return the number of CUDA graphs in this process."""
    gc.collect()
    return sum(issubclass(type(found), torch.cuda.CUDAGraph) for found in gc.get_objects())


@pytest.mark.parametrize(
    "case",
    [
        graphed(MODEL),
        graphed(ONE),
        graphed(modules=("attn",)),
        graphed(experts=4, modules=("attn", "moe_router", "moe_preprocess")),
        graphed(ONE, experts=4, moe_use_grouped_tensor=True),
    ],
    ids=["model", "one layer", "attention", "parts of experts' layers", "experts"],
)
def test_deleting_graphs_frees_all_of_them(one_rank, case):
    before = graphs_alive()
    with captured(case) as model:
        model.step()
        assert graphs_alive() > before
    model.step()  # experts keep their last input, whose autograd graph references the replay
    assert graphs_alive() == before


def load_halved_weights(training):
    """Load halved weights, as from a checkpoint."""
    weights = training.fsdp.state_dict().items()
    halved = {name: each * 0.5 if isinstance(each, torch.Tensor) else each for name, each in weights}
    training.fsdp.load_state_dict(halved)


def halve_parameters(training):
    """Halve the optimizer's parameters, and copy them to the model's weights."""
    for _, param in training.fsdp.param_and_grad_buffer.optimizer_named_parameters:
        param.detach().copy_(param.detach() * 0.5)
    training.fsdp.install_optimized_model_weights()


def halve_shards(training):
    """Halve the shards of the model's weights, and of the fp32 main weights if they exist."""
    training.fsdp.synchronize_param_gather()  # gathers in flight read them
    for group in training.fsdp.param_and_grad_buffer.parameter_groups:
        for buffer in filter(None, (group.model_weight_buffer, group.main_weight_buffer)):
            buffer.data.copy_(buffer.data * 0.5)


WAYS = [(load_halved_weights, "fp32"), (halve_parameters, "bf16"), (halve_shards, "fp32"), (halve_shards, "bf16")]


@pytest.mark.parametrize(("overwrite", "dtype"), WAYS)
@pytest.mark.parametrize("holds", [MODEL, ONE])
def test_weights_overwritten_between_steps_are_used(one_rank, holds, overwrite, dtype):
    case = graphed(holds, dtype=dtype)

    def with_nothing_gathered(training):
        with torch.cuda.stream(training.stream):
            training.fsdp.synchronize_param_gather()
        with_some_gathered(training)

    def with_some_gathered(training):
        if len(training.losses) == 2:
            with torch.cuda.stream(training.stream):
                overwrite(training)

    expected = trained(case, False, between=with_nothing_gathered)
    assert expected.differences(trained(case, False)) != []
    assert expected.differences(trained(case, False, between=with_some_gathered)) == []
    graphs = trained(case, True, between=with_some_gathered)
    assert expected.differences(graphs) == []
    assert graphs.replays == REPLAYS[holds]


def test_offloading_frees_optimizer_states_and_weights(one_rank):
    training = CapturedTraining(graphed("model", dtype="bf16"), graphs=False)
    training.step()  # on local shards, which alias the states
    states = [value for state in training.optimizer.optimizer.state.values() for value in state.values()]
    on_device = [weakref.ref(local_tensor(value)) for value in states if value.is_cuda]
    del states
    groups = training.fsdp.param_and_grad_buffer.parameter_groups
    params = [param._local_tensor for group in training.optimizer.param_groups for param in group["params"]]
    weights = [param.clone() for param in params]
    with mock.patch.object(torch.cuda, "synchronize") as synchronize:
        training.optimizer.offload_to_cpu()
    assert synchronize.called
    assert on_device and [state() for state in on_device] == [None] * len(on_device)
    assert {group.main_weight_buffer.data.untyped_storage().nbytes() for group in groups} == {0}
    training.optimizer.restore_from_cpu()
    assert all(map(torch.equal, weights, params))


def test_replays_keep_gradients_until_the_optimizer_step(one_rank):
    training = CapturedTraining(graphed(dtype="bf16"))
    training.step()
    params = [param for _, param in training.fsdp.param_and_grad_buffer.optimizer_named_parameters]
    grads = [param.grad._local_tensor for param in params if param.grad is not None]
    expected = [grad.clone() for grad in grads]
    run_backward(training.fsdp, training.case)
    assert all(map(torch.equal, grads, expected))
    training.fsdp.zero_grad_buffer()
    assert {grad.untyped_storage().nbytes() for grad in grads} == {0}  # they have left the graphs' pool
    training.delete()


def penalize_embedding(training, before=False):
    """Add a penalty on the embedding weights to the loss.

    If ``before``, compute the penalty before the forward pass.
    """
    if "_losses" in vars(training):
        return
    losses = training._losses

    def penalty():
        return training.fsdp.module.embedding.word_embeddings.weight.float().pow(2).mean()

    training._losses = lambda *call: penalty() + losses(*call) if before else losses(*call) + penalty()


@pytest.mark.parametrize("before", [False, True])
def test_gradients_beside_graphs_of_the_model_are_refused(one_rank, before):
    with pytest.raises(RuntimeError, match=r"embedding\.word_embeddings\.weight gets a gradient that the CUDA graphs"):
        trained(graphed(MODEL), True, between=partial(penalize_embedding, before=before))


class TrainsEmbeddingApart(CapturedTraining):
    """A training run in which a penalty on parameters outside of units has its own backward pass."""

    def _run_passes(self, *args, **kwargs):
        reduced = super()._run_passes(*args, **kwargs)
        model = self.fsdp.module
        outside = [model.embedding.word_embeddings.weight, *model.decoder.final_layernorm.parameters()]
        sum(weight.float().pow(2).mean() for weight in outside).backward()
        return reduced


def test_backward_pass_outside_the_model_adds_gradients(one_rank):
    assert compared(graphed(MODEL), steps=1, kind=TrainsEmbeddingApart).replays == REPLAYS[MODEL]


def test_gradients_beside_graphs_of_layers_are_added(one_rank):
    assert compared(graphed(ONE), penalize_embedding).replays == REPLAYS[ONE]


class LooksAhead(CapturedTraining):
    """A training run that first computes each micro-batch's losses without gradients, in training mode."""

    def _forward_step(self, batches, model, return_schedule_plan=False):
        first, second = tee(batches)
        losses, loss_of = super()._forward_step(first, model)
        with torch.no_grad():
            self.evaluations.append(self._losses(model, SimpleNamespace(**next(second))).tolist())
        return losses, loss_of


@pytest.mark.parametrize(
    ("holds", "modules"), [(MODEL, ()), (ONE, ()), (ONE, ("attn", "moe_router", "moe_preprocess"))]
)
def test_passes_without_gradients_change_nothing(one_rank, holds, modules):
    """Check that routers count tokens and accumulate losses only in passes with gradients."""
    router = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    case = graphed(holds, dropout=0.1, experts=4, modules=modules, moe_use_grouped_tensor=not modules, **router)
    case = replace(case, dtype="fp32" if modules else "bf16")
    assert compared(case, kind=LooksAhead).replays == REPLAYS[holds]
