"""Test whole-model graphs under Megatron-FSDP: gathers, moved buffers, cleanup and unsupported configurations."""

import logging
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import AllGatherPipeline
from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import get_global_memory_buffer
from megatron.core.transformer._cuda_graphs.errors import ChangedSinceCaptureError

from ..captured_training import FLAGS, WARMED_UP, CapturedModel, captured, graphed, in_use, occupied
from ..fsdp_variants import Variant, run_backward, small
from ..test_captured_training import Unused

pytestmark = pytest.mark.sampled

MODEL = "model"


def outside(fsdp):
    """Return the indices and the parameters of the buckets outside of units."""
    groups = fsdp.param_and_grad_buffer.parameter_groups
    buckets = [bucket for bucket, group in enumerate(groups) if group.fsdp_unit_id is None]
    assert buckets
    return buckets, [param for bucket in buckets for param in groups[bucket].params]


def status(fsdp):
    return {fsdp.all_gather_pipeline.bucket_status[bucket, False].name for bucket in outside(fsdp)[0]}


def test_no_buffer_is_in_use_after_a_step(ranks):
    with captured(graphed(MODEL)) as training:
        training.step()
        hooks = training.fsdp.fsdp_hooks
        assert in_use(training.fsdp) == [{}, {}]
        assert (hooks.graphs.gradients.awaited, hooks.backward.is_open, hooks.graphs.captured) == (set(), False, None)
        assert training.fsdp.grad_reduce_pipeline.grad_reduce_queue == []
        assert status(training.fsdp) == {"PRESERVED"}
        states = {module._training_state.name for layer in training.layers for module in layer.modules()}
        assert states == {"IDLE"}


def main_grads(training):
    return [group.main_grad_buffer.data.clone() for group in training.fsdp.param_and_grad_buffer.parameter_groups]


@pytest.mark.parametrize("called", ["the wrapper", "the model inside"])
def test_passes_in_evaluation_mode_compute_gradients(ranks, monkeypatch, called):
    with captured(graphed(MODEL)) as training:
        training.step()
        assert training.helper.model_graphs is not None
        replayed = main_grads(training)
        training.model.eval()
        if called == "the model inside":
            training.fsdp.start_param_sync()
            inside = training.fsdp.module
            monkeypatch.setattr(training.fsdp, "forward", lambda *args, **kwargs: inside(*args, **kwargs))
        hooks = training.fsdp.fsdp_hooks
        monkeypatch.setattr(training.helper.model_graphs.slots[0], "replay", lambda _: pytest.fail("a graph replayed"))
        with mock.patch.object(hooks.backward, "_expect_gradients", wraps=hooks.backward._expect_gradients) as expected:
            training.step()
        assert expected.call_count == 1
        assert all(torch.equal(*each) for each in zip(main_grads(training), replayed, strict=True))


def test_parameters_outside_of_units_are_gathered_once(ranks):
    with captured(graphed(MODEL, microbatches=3)) as training:
        training.step()
        recorded = list(dict.fromkeys(training.fsdp.all_gather_pipeline.recorded.values()))
        with mock.patch.object(type(recorded[0]), "_replay", autospec=True) as launched:
            training.step()
        assert [call.args[0] for call in launched.call_args_list] == recorded


def add_unused(model):
    model.decoder.layers[0].mlp = Unused(model.decoder.layers[0].mlp)


def test_incomplete_bucket_beside_replays_is_an_error(ranks):
    case = graphed(MODEL)
    with captured(case, Variant(case, change=add_unused)) as training:
        training.step()
        training.fsdp.zero_grad_buffer()
        run_backward(training.fsdp, case)
        training.layers[0](torch.ones(case.sequence, case.micro_batch, case.hidden, device="cuda"))[0].sum().backward()
        with pytest.raises(AssertionError, match="parameters that are ready"):
            training.fsdp.finish_grad_sync()


def test_first_unit_is_gathered_early(ranks):
    """Check that the gather overlaps the embedding in forward, and the loss and the output layer in backward."""
    events: list[Any] = []
    gather = AllGatherPipeline.async_bucket_gather

    def note(event):
        if torch.cuda.is_current_stream_capturing():
            events.append(event)

    def gathered(pipeline, bucket_id, bwd):
        note(bucket_id)
        return gather(pipeline, bucket_id, bwd)

    def watch(model):
        embed, loss = model.embedding.forward, model.compute_language_model_loss

        def embedded(*args, **kwargs):
            note("embedding")
            return embed(*args, **kwargs)

        def losses(labels, logits):
            logits.register_hook(lambda grad: note("gradient of logits"))
            return loss(labels, logits)

        model.embedding.forward, model.compute_language_model_loss = embedded, losses

    case = graphed(MODEL)
    with (
        mock.patch.object(AllGatherPipeline, "async_bucket_gather", gathered),
        captured(case, Variant(case, change=watch)) as training,
    ):
        units = [training.fsdp.graphs.units[layer].buckets[0] for layer in training.layers]
    first, *_, last = units
    assert events[:2] == [first, "embedding"]
    logits = events.index("gradient of logits")
    assert events[logits - 1] == last
    assert events[2 : logits - 1] == units[1:]


def test_moved_parameter_outside_of_units_is_named(ranks):
    with captured(graphed(MODEL)) as training:
        training.step()
        _, params = outside(training.fsdp)
        name = training.fsdp.param_to_name[params[0]]
        before = params[0].data
        training.fsdp._replace_param_with_raw_if_needed()
        owner = training.fsdp.graphs.whole_passes
        with mock.patch.object(owner, "gather"):
            params[0].data = before.clone()
            with pytest.raises(ChangedSinceCaptureError, match=f"changed since capture: {name} ") as error:
                owner.before_forward()
        params[0].data = before
        assert all(flag in str(error.value) for flag in FLAGS)


@pytest.mark.parametrize(("kind", "what"), [("model_weight_buffer", "parameters"), ("main_grad_buffer", "gradients")])
def test_moved_buffer_of_units_is_an_error(ranks, kind, what):
    with captured(graphed(MODEL)) as training:
        with occupied(training.fsdp, kind), pytest.raises(ChangedSinceCaptureError, match=f"{what} of bucket") as error:
            training.step()
        assert all(flag in str(error.value) for flag in FLAGS)


def test_moved_gradient_bucket_outside_of_units_is_an_error(ranks):
    with captured(graphed(MODEL)) as training:
        bucket = outside(training.fsdp)[0][0]
        buffer = training.fsdp.param_and_grad_buffer.parameter_groups[bucket].main_grad_buffer
        dtype = training.fsdp.mp_policy.grad_comm_dtype
        address = buffer.fetch_bucket(dtype=dtype).data.data_ptr()
        buffer.free_bucket_storage()
        memory = get_global_memory_buffer().buffer
        elsewhere = {name: one.clone() for name, one in memory.items() if one.data_ptr() == address}
        with mock.patch.dict(memory, elsewhere), pytest.raises(ChangedSinceCaptureError, match="gradients"):
            training.step()


def with_hook(model):
    model.decoder.final_layernorm.register_forward_hook(lambda *_: None)


def with_parameter_hook(model):
    next(model.embedding.parameters()).register_post_accumulate_grad_hook(lambda _: None)


def with_gradient_hook(model):
    next(model.embedding.parameters()).register_hook(lambda grad: None)


def with_delayed_gradient(model):
    next(model.embedding.parameters()).skip_backward_post_hook = True


UNSHARDED = {"data_parallel_sharding_strategy": "optim_grads", "fsdp_double_buffer": True}


def with_own_forward(model):
    model.forward = model.forward


@pytest.mark.parametrize(
    ("case", "change", "reason"),
    [
        ({"modules": ("attn",)}, None, "only modules of layers are captured"),
        (UNSHARDED, None, "its collectives cannot be captured"),
        ({}, with_hook, "decoder.final_layernorm has hooks"),
        ({}, with_parameter_hook, "parameter embedding.word_embeddings.weight has hooks"),
        ({}, with_gradient_hook, "parameter embedding.word_embeddings.weight has hooks"),
        ({}, with_delayed_gradient, "the weight gradient of embedding.word_embeddings.weight is delayed"),
        ({}, with_own_forward, "GPTModel is not a GPTModel or HybridModel with an unmodified forward"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_layers_are_captured_if_the_whole_model_cannot_be(ranks, caplog, case, change, reason):
    capture = CapturedModel.step

    def changed(model):
        capture(model)
        if change is not None and not hasattr(model, "helper"):
            model.fsdp._replace_param_with_raw_if_needed()
            change(model.fsdp.module)

    with (
        caplog.at_level(logging.WARNING),
        mock.patch.object(CapturedModel, "step", changed),
        captured(small(layers=3, holds=MODEL, warmup=WARMED_UP, **case)) as training,
    ):
        assert training.helper.model_graphs is None
        assert all(layer.cuda_graphs for layer in training.layers)
        assert training.fsdp.graphs.whole_passes is None
    (message,) = [record.message for record in caplog.records if "Layers are captured instead" in record.message]
    assert f"Layers are captured instead of the whole model, because {reason}" in message
