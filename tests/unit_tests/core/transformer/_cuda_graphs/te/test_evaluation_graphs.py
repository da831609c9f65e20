"""Test that evaluation graphs are bit-identical to eager evaluation and do not affect training.

Each run uses one rank in this process. Integration tests evaluate on two ranks.
"""

import logging
import weakref
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.transformer._cuda_graphs.agreement import CaptureAgreement, Failure
from megatron.core.transformer._cuda_graphs.errors import CaptureInterruptedError
from tests.unit_tests.core.distributed.captured_training import CapturedTraining, compared, graphed, in_use, trained

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("side_stream")]

MODEL = "model"  # scope of a graph
PACKED: dict[str, Any] = {"packed": 3, "micro_batch": 1, "positions": "none"}


def evaluate(training):
    training.evaluate()


def evaluate_as(training, **changes):
    with mock.patch.object(training, "case", replace(training.case, **changes)):
        training.evaluate()


@pytest.mark.parametrize(
    ("holds", "changes"),
    [
        (MODEL, {"dropout": 0.1, "dtype": "bf16", "microbatches": 2}),
        (None, {"recompute_modules": ("core_attn",), "multi_latent_attention": True}),
        (MODEL, PACKED),
    ],
    ids=["dropout", "recompute", "packed"],
)
def test_evaluation_replays_the_model_graph(one_rank, holds, changes):
    graphs = compared(graphed(holds, **changes), evaluate)
    assert graphs.evaluation_replays == [changes.get("microbatches", 1)] * 2


def test_unpadded_packed_evaluation_runs_eagerly(one_rank, caplog):
    with caplog.at_level(logging.INFO):
        graphs = compared(graphed(MODEL, **PACKED), partial(evaluate_as, packed=4))
    assert graphs.evaluation_replays == [0, 0]
    assert graphs.replays == 2
    assert any("Evaluation runs eagerly, because the model's cu_seqlens_q" in message for message in caplog.messages)


def test_first_evaluation_fixes_the_shapes(one_rank):
    def evaluate_twice(training):
        evaluate_as(training, evaluated_sequence=8, micro_batch=1)
        training.evaluate()

    graphs = compared(graphed(MODEL), evaluate_twice)
    assert graphs.evaluation_replays == [1, 0] * 2
    assert graphs.replays > 0


def test_capture_happens_once_and_draws_no_random_numbers(one_rank, caplog):
    training = CapturedTraining(graphed(MODEL, dropout=0.1))
    before = torch.cuda.get_rng_state()
    with caplog.at_level(logging.INFO):
        training.evaluate()
        training.evaluate()
    messages = [message for message in caplog.messages if "for evaluation" in message]
    assert messages == ["Captured the whole model for evaluation"]
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert in_use(training.fsdp) == [{}, {}]
    training.delete()


def test_pass_with_grad_in_evaluation_mode_captures_nothing(one_rank):
    training = CapturedTraining(graphed(MODEL))
    (chunk,) = training.chunks
    with torch.cuda.stream(training.stream):
        training._losses(chunk.eval(), next(training._batches(7)))
    assert training.helper.model_graphs.evaluation is None
    training.evaluate()
    assert training.evaluation_replays == [1]
    training.delete()


def evaluate_before_the_optimizers_step(training):
    step = training.optimizer.step
    training.optimizer.step = lambda: (training.evaluate(), step())[1]


def evaluate_before_backward(training):
    """Evaluate between the forward and backward pass of a micro-batch."""
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


@pytest.mark.parametrize("between", [evaluate_before_the_optimizers_step, evaluate_before_backward])
@pytest.mark.parametrize("holds", ["layer", MODEL])
def test_evaluation_within_a_step_changes_nothing(one_rank, between, holds):
    plain = trained(graphed(holds, dropout=0.1), False, steps=1)
    graphs = compared(graphed(holds, dropout=0.1), between, steps=1)
    assert len(graphs.evaluations) == 1
    assert (plain.losses, plain.grad_norms) == (graphs.losses, graphs.grad_norms)
    assert all(map(torch.equal, plain.shards, graphs.shards))


def test_deleted_graphs_are_not_replayed(one_rank):
    def delete_and_capture(training):
        training.evaluate()
        if training.helper is not None:
            training.helper.delete_cuda_graphs()
        training.evaluate()
        if training.helper is not None:
            training.capture(lambda training: training.helper.create_cudagraphs())
        training.evaluate()

    graphs = compared(graphed(MODEL, dropout=0.1), delete_and_capture)
    assert graphs.evaluation_replays == [1, 0, 1] * 2


def test_hook_inside_a_layer_runs_in_evaluation(one_rank):
    training = CapturedTraining(graphed(MODEL))
    training.evaluate()
    seen = []
    handle = training.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(output))
    training.evaluate()
    assert len(seen) == 1
    handle.remove()
    training.evaluate()
    assert training.evaluation_replays == [1, 0, 1]
    training.delete()


def logits(training, step):
    batch = next(training._batches(step))
    model = training.chunks[0].eval()
    with torch.cuda.stream(training.stream), torch.no_grad():
        output = model(batch.tokens, batch.positions, batch.mask)
    training.chunks[0].train()
    return output


@pytest.mark.parametrize("labels_first", [True, False])
def test_first_evaluation_fixes_whether_calls_have_labels(one_rank, labels_first):
    case = graphed(MODEL)
    eager, training = CapturedTraining(case, graphs=False), CapturedTraining(case)
    if labels_first:
        training.evaluate()
    for _ in range(2):
        assert torch.equal(logits(eager, 7), logits(training, 7))
    training.evaluate()
    assert training.evaluation_replays == ([1, 1] if labels_first else [0])
    training.delete()


def test_output_is_not_overwritten_by_the_next_evaluation(one_rank):
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


def test_evaluation_inside_a_backward_pass_runs_eagerly(one_rank):
    """Check that evaluation does not release gathered parameters that the backward pass still reads."""

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

    graphs = compared(graphed(MODEL), evaluate_in_backward, steps=1)
    assert len(graphs.evaluations) == 2
    assert graphs.evaluation_replays == [1]


def test_memory_is_freed_with_the_graphs(one_rank):
    training = CapturedTraining(graphed(MODEL))
    training.evaluate()
    graphs = training.helper.model_graphs.evaluation
    assert graphs.slots[0].forward_graph.pool() != training.helper.model_graphs.slots[0].forward_graph.pool()
    gone = weakref.ref(graphs.slots[0].forward_graph), weakref.ref(graphs)
    del graphs
    training.delete()
    assert [reference() for reference in gone] == [None] * 2


def test_layers_with_third_party_hooks_are_not_captured(one_rank, caplog):
    training = CapturedTraining(graphed(MODEL))
    seen = []
    training.layers[1].register_forward_hook(lambda module, args, output: seen.append(output))
    with caplog.at_level(logging.INFO):
        training.evaluate()
    assert len(seen) == 1
    assert training.evaluation_replays == [0]
    reason = "layers, or modules in them, have third-party hooks"
    assert f"Evaluation runs eagerly, because {reason}" in caplog.messages
    training.delete()


def test_failed_capture_leaves_evaluation_eager(one_rank, caplog):
    def evaluate_with_host_read(training):
        mlp = training.layers[1].mlp
        forward = mlp.forward
        reading = mock.patch.object(mlp, "forward", lambda *args, **kwargs: (args[0].sum().item(), forward(*args))[1])
        with reading, mock.patch.object(training.fsdp.param_and_grad_buffer, "leave_graphs") as leave_graphs:
            training.evaluate()
        leave_graphs.assert_not_called()  # training graphs still use that memory
        training.evaluate()
        assert training.fsdp.graphs.captured is None
        assert in_use(training.fsdp) == [{}, {}]

    with caplog.at_level(logging.WARNING):
        graphs = compared(graphed(MODEL, dropout=0.1), evaluate_with_host_read)
    assert graphs.evaluation_replays == [0] * 4
    assert graphs.replays > 0
    (message,) = (message for message in caplog.messages if "Evaluation runs eagerly" in message)
    assert "CUDA graph capture failed on rank 0, evaluation of the whole model" in message


def test_interrupt_on_another_rank_ends_evaluation(one_rank, monkeypatch):
    interrupt = Failure(1, "evaluation of the whole model", "KeyboardInterrupt", interrupted=True)
    training = CapturedTraining(graphed(MODEL))

    def interrupted(agreement, ballots, blockers=None):
        if blockers:
            return dict(blockers)
        raise interrupt.error()

    monkeypatch.setattr(CaptureAgreement, "_vote", interrupted)
    monkeypatch.setattr(CaptureAgreement, "_failed", lambda agreement, error: interrupt.error())
    with pytest.raises(CaptureInterruptedError, match="interrupted on rank 1"):
        training.evaluate()
    training.delete()
