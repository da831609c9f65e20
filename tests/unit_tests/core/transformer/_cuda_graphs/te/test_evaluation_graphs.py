"""Evaluation under Megatron-FSDP replays graphs of its own, computes what it computes eagerly, and disturbs nothing.

Trainings run in this process, as one rank. The integration tests evaluate on two.
"""

import logging
import weakref
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.transformer._cuda_graphs.errors import CaptureFailedError, CaptureInterruptedError
from megatron.core.transformer._cuda_graphs.te.agreement import CaptureAgreement, Failure
from tests.support.sample import each_once, mostly_long
from tests.unit_tests.core.distributed.captured_training import CapturedTraining, graphed, in_use, trained
from tests.unit_tests.core.distributed.fsdp_variants import FINE_FORWARD, Variant

pytestmark = pytest.mark.usefixtures("side_stream")

MODEL = -1  # what a graph holds
PARTS_OF_MOE = ("attn", "moe_router", "moe_preprocess")
PACKED: dict[str, Any] = {"packed": 3, "micro_batch": 1, "positions": "none"}


def compared(case, between, steps=2):
    """The traces of an eager training and of one with graphs, with ``between`` called before each step."""
    eager = trained(replace(case, modules=(), layers_per_graph=0), False, between=between, steps=steps)
    graphs = trained(case, True, between=between, steps=steps)
    return eager, graphs


def evaluate(training):
    training.evaluate()


def replays_of(layers_per_graph):
    """How often graphs are replayed in an evaluation of a micro-batch."""
    return 1 if layers_per_graph in (None, MODEL) else 3


@pytest.mark.parametrize(
    ("layers_per_graph", "changes"),
    [
        (0, {"dropout": 0.1, "dtype": "bf16", "microbatches": 2}),
        (1, {"dropout": 0.1, "dtype": "bf16", "microbatches": 2}),
        (0, {"mtp": 1}),
        (0, {"recompute": ("core_attn", "mlp")}),
        (MODEL, {"dropout": 0.1, "dtype": "bf16", "microbatches": 2}),
        (None, {"recompute": ("core_attn",), "latent_attention": True}),
        (MODEL, PACKED),
    ],
    ids=["all layers in a graph", "one", "MTP", "recompute", "the model", "the model, recompute", "the model, packed"],
)
def test_evaluation_replays_a_graph_for_each_layer_or_one_of_the_model(one_rank, layers_per_graph, changes):
    eager, graphs = compared(graphed(layers_per_graph, **changes), evaluate)
    assert eager.differences(graphs) == []
    replays = (replays_of(layers_per_graph) + changes.get("mtp", 0)) * changes.get("microbatches", 1)
    assert graphs.evaluation_replays == [replays] * 2
    assert eager.evaluation_replays == [0, 0]


@pytest.mark.parametrize(("layers_per_graph", "sequences"), [(0, 3), (MODEL, 4)], ids=["of layers", "not padded"])
def test_evaluation_of_packed_sequences_runs_eagerly_where_graphs_do_not_fit_it(
    one_rank, caplog, layers_per_graph, sequences
):
    with caplog.at_level(logging.INFO):
        between = partial(evaluate_as, packed=sequences)
        eager, graphs = compared(graphed(layers_per_graph, **PACKED), between)
    assert eager.differences(graphs) == []
    assert graphs.evaluation_replays == [0, 0]
    assert graphs.replays == 2
    assert any("sequences are packed, and graphs of layers" in record.message for record in caplog.records)


PARTS: list[dict[str, Any]] = [
    {"modules": ("attn",), "dropout": 0.1},
    {"modules": ("mlp",)},
    {"modules": PARTS_OF_MOE, "experts": 4, "dropout": 0.1},
    {"modules": ("moe_router",), "experts": 4, "shared_experts": 64},
    {"modules": PARTS_OF_MOE, "experts": 4, "shared_experts": 64, "shared_overlap": True},
    {"modules": ("attn", "moe"), "experts": 4, "capacity": 1.0},
]


@pytest.mark.parametrize(
    "changes",
    mostly_long(PARTS, *PARTS[:2], PARTS[4]),
    ids=lambda changes: " ".join(changes["modules"]) + " overlapped" * changes.get("shared_overlap", False),
)
def test_evaluation_replays_parts_of_layers_too(one_rank, changes):
    eager, graphs = compared(graphed(**changes), evaluate)
    assert eager.differences(graphs) == []
    assert graphs.evaluation_replays == [3, 3]


def evaluate_as(training, **changes):
    with mock.patch.object(training, "case", replace(training.case, **changes)):
        training.evaluate()


KINDS: dict[str, dict[str, Any]] = {
    "layers": {},
    "whole model": {"layers_per_graph": None},
    "parts": {"modules": PARTS_OF_MOE, "experts": 4},
}


@pytest.mark.parametrize(("kind", "changed"), each_once(KINDS, ["evaluated_sequence", "micro_batch"]))
def test_graphs_for_evaluation_have_the_shapes_of_the_first_one(one_rank, kind, changed):
    value = {"evaluated_sequence": 8, "micro_batch": 1}[changed]
    eager, graphs = compared(graphed(**KINDS[kind]), partial(evaluate_as, **{changed: value}))
    assert eager.differences(graphs) == []
    assert graphs.evaluation_replays == [replays_of(KINDS[kind].get("layers_per_graph", 0))] * 2
    assert graphs.replays > 0


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_with_yet_other_shapes_runs_eagerly_and_leaves_training_the_shapes_it_needs(one_rank, kind):
    def evaluate_twice(training):
        training.evaluate()
        evaluate_as(training, evaluated_sequence=8)

    eager, graphs = compared(graphed(**KINDS[kind]), evaluate_twice)
    assert eager.differences(graphs) == []
    assert graphs.evaluation_replays == [replays_of(KINDS[kind].get("layers_per_graph", 0)), 0] * 2
    assert graphs.replays > 0


@pytest.mark.parametrize(("layers_per_graph", "captured"), [(0, "3 layer graphs"), (MODEL, "the whole model")])
def test_capture_for_evaluation_happens_once_and_draws_no_random_numbers(one_rank, caplog, layers_per_graph, captured):
    training = CapturedTraining(graphed(layers_per_graph, dropout=0.1))
    before = torch.cuda.get_rng_state()
    with caplog.at_level(logging.INFO):
        training.evaluate()
        training.evaluate()
    messages = [record.message for record in caplog.records if "for evaluation" in record.message]
    assert messages == [f"Captured {captured} for evaluation"]
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert in_use(training.fsdp) == [{}, {}]
    training.delete()


def test_a_pass_with_grad_in_evaluation_mode_captures_nothing_and_the_next_without_does(one_rank):
    training = CapturedTraining(graphed())
    (chunk,) = training.chunks
    with torch.cuda.stream(training.stream):
        training._losses(chunk.eval(), next(training._batches(7)))
    assert [layer.evaluation_graph for layer in training.layers] == [None] * 3
    training.evaluate()
    assert training.evaluation_replays == [3]
    training.delete()


def gathered(training):
    """The numbers of the layers whose parameters are gathered."""
    status = training.fsdp.all_gather_pipeline.bucket_status
    bucket_of = training.fsdp.param_and_grad_buffer.param_to_param_group
    buckets = [{bucket_of[param] for param in layer.parameters()} for layer in training.layers]
    empty = type(next(iter(status.values()))).EMPTY
    return [number for number, own in enumerate(buckets) if any(status[bucket, False] is not empty for bucket in own)]


@pytest.mark.parametrize(("layers_per_graph", "options"), each_once([None, 1], [{}, FINE_FORWARD]))
def test_while_a_layer_is_captured_for_evaluation_no_other_is_gathered(one_rank, layers_per_graph, options):
    case = graphed(layers_per_graph)
    training = CapturedTraining(case, variant=Variant(case, fsdp=options))
    fsdp = training.fsdp
    fsdp._replace_param_with_raw_if_needed()
    for layer in training.layers[1:]:
        fsdp.all_gather_and_wait_parameters_ready(list(layer.parameters()), prefetch=False)
    assert gathered(training) == [1, 2]
    with fsdp.graphs.capture_evaluation_graphs(training.layers[:1]):
        assert gathered(training) == []
        fsdp.fsdp_hooks.unshard_for_forward(training.layers[0])  # prefetches the next layer
        assert gathered(training) == [0]
        assert not fsdp.all_gather_pipeline.param_gather_event_map
    assert gathered(training) == []
    training.delete()


def test_evaluation_after_a_checkpoint_was_saved_sees_the_same_parameters(one_rank):
    def save_and_evaluate(training):
        saved = training.chunks[0].state_dict()
        assert training.fsdp.is_param_fsdp_distributed  # a checkpoint holds the optimizer's parameters
        assert len(saved) > 0
        training.evaluate()

    eager, graphs = compared(graphed(dropout=0.1), save_and_evaluate)
    assert eager.differences(graphs) == []
    assert graphs.evaluation_replays == [3, 3]


def evaluate_before_the_optimizers_step(training):
    step = training.optimizer.step
    training.optimizer.step = lambda: (training.evaluate(), step())[1]


@pytest.mark.parametrize("layers_per_graph", mostly_long([0, 1, MODEL], 1, MODEL))
def test_evaluation_between_backward_and_the_optimizers_step_leaves_gradients_alone(one_rank, layers_per_graph):
    plain = trained(graphed(layers_per_graph), False, steps=1)
    eager, graphs = compared(graphed(layers_per_graph), evaluate_before_the_optimizers_step, steps=1)
    assert eager.differences(graphs) == []
    assert (plain.losses, plain.grad_norms) == (graphs.losses, graphs.grad_norms)
    assert all(map(torch.equal, plain.shards, graphs.shards))
    assert graphs.evaluation_replays == [replays_of(layers_per_graph)]


def evaluate_before_backward(training):
    """Let the losses of a micro-batch wait for an evaluation before their backward pass."""
    losses_of = training._losses

    def losses(model, batch):
        computed = losses_of(model, batch)
        if model.training:
            model.eval()
            with torch.no_grad():
                training.evaluations.append(losses_of(model, batch).tolist())
            model.train()
        return computed

    training._losses = losses


@pytest.mark.parametrize("layers_per_graph", mostly_long([0, 1, MODEL], 1, MODEL))
def test_evaluation_between_forward_and_backward_leaves_activations_alone(one_rank, layers_per_graph):
    plain = trained(graphed(layers_per_graph, dropout=0.1), False, steps=1)
    eager, graphs = compared(graphed(layers_per_graph, dropout=0.1), evaluate_before_backward, steps=1)
    assert len(graphs.evaluations) == 1
    assert eager.differences(graphs) == []
    assert (plain.losses, plain.grad_norms) == (graphs.losses, graphs.grad_norms)
    assert all(map(torch.equal, plain.shards, graphs.shards))


@pytest.mark.parametrize("layers_per_graph", [0, MODEL])
def test_deleted_graphs_are_replayed_no_more_until_layers_are_captured_again(one_rank, layers_per_graph):
    def delete_and_capture(training):
        training.evaluate()
        if training.helper is not None:
            training.helper.delete_cuda_graphs()
            assert [layer.evaluation_graph for layer in training.layers] == [None] * 3
        training.evaluate()
        if training.helper is not None:
            training.capture(lambda training: training.helper.create_cudagraphs())
        training.evaluate()

    eager, graphs = compared(graphed(layers_per_graph, dropout=0.1), delete_and_capture)
    assert eager.differences(graphs) == []
    assert graphs.evaluation_replays == [replays_of(layers_per_graph), 0, replays_of(layers_per_graph)] * 2


def test_deleting_graphs_before_any_evaluation_leaves_evaluation_eager(one_rank):
    training = CapturedTraining(graphed())
    training.delete()
    training.evaluate()
    assert training.evaluation_replays == [0]


@pytest.mark.parametrize(
    ("layers_per_graph", "replays"), [(1, [3, 2, 3]), (MODEL, [1, 0, 1])], ids=["layer-graphs", "the-whole-model"]
)
def test_a_hook_inside_a_layer_runs_in_evaluation_and_what_is_in_other_graphs_replays(
    one_rank, layers_per_graph, replays
):
    training = CapturedTraining(graphed(layers_per_graph))
    training.evaluate()
    seen = []
    handle = training.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(output))
    training.evaluate()
    assert len(seen) == 1
    handle.remove()
    training.evaluate()
    assert training.evaluation_replays == replays
    training.delete()


def losses_without_labels(training, step):
    batch = next(training._batches(step))
    model = training.chunks[0].eval()
    with torch.cuda.stream(training.stream), torch.no_grad():
        output = model(batch.tokens, batch.positions, batch.mask)
    training.chunks[0].train()
    return output


def test_a_first_evaluation_without_losses_captures_layers(one_rank):
    case = graphed(MODEL)
    eager, training = CapturedTraining(case, graphs=False), CapturedTraining(case)
    for _ in range(2):
        assert torch.equal(losses_without_labels(eager, 7), losses_without_labels(training, 7))
    assert all(layer.evaluation_graph is not None for layer in training.layers)
    training.evaluate()
    assert training.evaluation_replays == [3]
    training.delete()


def test_evaluation_without_losses_runs_eagerly_beside_a_graph_of_the_model(one_rank):
    case = graphed(MODEL)
    eager, training = CapturedTraining(case, graphs=False), CapturedTraining(case)
    training.evaluate()
    assert torch.equal(losses_without_labels(eager, 7), losses_without_labels(training, 7))
    training.delete()


def test_what_evaluation_of_the_model_returns_is_not_overwritten_by_the_next(one_rank):
    training = CapturedTraining(graphed(MODEL))
    training.evaluate()
    model = training.chunks[0].eval()
    with torch.cuda.stream(training.stream), torch.no_grad():
        first = training._losses(model, next(training._batches(7)))
        before = first.clone()
        second = training._losses(model, next(training._batches(8)))
    assert torch.equal(first, before)
    assert not torch.equal(first, second)
    model.train()
    training.delete()


def test_a_model_that_a_backward_pass_evaluates_is_not_replayed(one_rank):
    """What the pass still reads must stay gathered."""

    def evaluate_in_backward(training):
        losses_of = training._losses

        def losses(model, batch):
            def evaluate(grad):
                model.eval()
                with torch.no_grad():
                    training.evaluations.append(losses_of(model, batch).tolist())
                model.train()

            computed = losses_of(model, batch)
            if model.training:
                computed.register_hook(evaluate)
            return computed

        training.evaluate()
        training._losses = losses

    eager, graphs = compared(graphed(MODEL), evaluate_in_backward, steps=1)
    assert eager.differences(graphs) == []
    assert len(graphs.evaluations) == 2
    assert graphs.evaluation_replays == [1]


def test_the_memory_of_evaluation_is_freed_with_the_graphs(one_rank):
    training = CapturedTraining(graphed(MODEL))
    before = training.helper.graph_use().pool_bytes
    training.evaluate()
    graphs = training.helper.model_graphs.evaluation
    assert training.helper.graph_use().pool_bytes > before
    assert graphs.passes.forward_graph.pool() != training.helper.model_graphs.passes.forward_graph.pool()
    gone = weakref.ref(graphs.passes.forward_graph), weakref.ref(graphs)
    del graphs
    training.delete()
    assert [reference() for reference in gone] == [None] * 2


def test_a_parameter_that_is_not_gathered_for_graphs_may_be_elsewhere_at_a_replay(one_rank):
    training = CapturedTraining(graphed(modules=("attn",)))
    with mock.patch.object(training.fsdp.graphs, "read_by_graphs", lambda layer: [*layer.self_attention.parameters()]):
        training.evaluate()
    layer = training.layers[1]
    parameters, gathered = layer.mlp.linear_fc2._parameters, []

    def move(*_):
        gathered.append(parameters["weight"])
        parameters["weight"] = torch.nn.Parameter(gathered[0].detach().clone())

    layer.register_forward_pre_hook(move)
    layer.register_forward_hook(lambda *_: parameters.update(weight=gathered[0]))
    training.evaluate()
    assert len(gathered) == 1
    assert training.evaluation_replays == [3, 3]
    training.delete()


@pytest.mark.parametrize("layers_per_graph", [0, MODEL])
def test_layers_that_have_hooks_of_others_in_the_first_evaluation_get_no_graphs_for_it(
    one_rank, caplog, layers_per_graph
):
    training = CapturedTraining(graphed(layers_per_graph))
    seen = []
    training.layers[1].register_forward_hook(lambda module, args, output: seen.append(output))
    with caplog.at_level(logging.INFO):
        training.evaluate()
    assert len(seen) == 1
    assert training.evaluation_replays == [0]
    reason = "layers, or modules in them, have hooks of others"
    assert f"Evaluation runs eagerly, because {reason}" in caplog.messages
    training.delete()


def evaluate_with_host_read(training):
    """Evaluate, with a layer that reads a value on the host."""
    mlp = training.layers[1].mlp
    forward = mlp.forward
    with mock.patch.object(mlp, "forward", lambda *args, **kwargs: (args[0].sum().item(), forward(*args))[1]):
        training.evaluate()


@pytest.mark.parametrize("layers_per_graph", [0, MODEL])
def test_a_failed_capture_for_evaluation_is_an_error_by_default(one_rank, layers_per_graph):
    training = CapturedTraining(graphed(layers_per_graph))
    with pytest.raises(CaptureFailedError, match="evaluation of "):
        evaluate_with_host_read(training)
    training.evaluate()
    assert training.evaluation_replays == [0]
    training.delete()


def test_an_interrupt_on_another_rank_ends_evaluation(one_rank, monkeypatch):
    interrupt = Failure(1, "evaluation of layer 1", "KeyboardInterrupt", interrupted=True)
    training = CapturedTraining(graphed(MODEL))
    training.config.cuda_graph_fallback = "eager"
    monkeypatch.setattr(CaptureAgreement, "finish", lambda agreement: agreement._check(interrupt))
    with pytest.raises(CaptureInterruptedError, match="interrupted on rank 1"):
        training.evaluate()
    training.delete()


@pytest.mark.parametrize("layers_per_graph", mostly_long([0, 1, MODEL], 1, MODEL))
def test_a_failed_capture_for_evaluation_is_logged_and_leaves_evaluation_eager(one_rank, layers_per_graph, caplog):
    case = graphed(layers_per_graph, dropout=0.1)

    def fail(training):
        training.config.cuda_graph_fallback = "eager"
        evaluate_with_host_read(training)
        training.evaluate()
        assert training.fsdp.fsdp_hooks.registry.captured is None
        assert in_use(training.fsdp) == [{}, {}]

    with caplog.at_level(logging.WARNING):
        eager, graphs = compared(case, fail)
    assert eager.differences(graphs) == []
    assert graphs.evaluation_replays == [0] * 4
    (message,) = (message for message in caplog.messages if "Evaluation runs eagerly" in message)
    captured = "the whole model" if layers_per_graph == MODEL else "layer 2 (TransformerLayer)"
    assert f"CUDA graph capture failed on rank 0, evaluation of {captured}" in message
