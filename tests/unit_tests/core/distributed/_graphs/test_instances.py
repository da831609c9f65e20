"""What is sent between instances of hybrid sharding beside graphs: once in a step, in one order on all ranks."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch

from ..captured_training import captured, graphed
from ..fsdp_variants import Variant, run_backward

pytestmark = pytest.mark.sampled

MODEL, DECODER, LAYER = "model", "decoder", "layer"
KINDS = pytest.mark.parametrize("kind", [MODEL, DECODER, LAYER])
RECORDED = pytest.mark.parametrize("kind", [MODEL, DECODER])
GATHER, SHARD, SUM = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


@contextmanager
def trained(kind, instances, outer, **changes):
    """A model with graphs, between two steps."""
    with captured(
        graphed(kind, num_distributed_optimizer_instances=instances, outer_dp_sharding_strategy=outer, **changes)
    ) as training:
        training.fsdp.is_last_microbatch = True
        training.step()
        yield training


@contextmanager
def sent_between_instances(fsdp):
    """Note the collectives of the group of instances, each with the address of what it sends."""
    sent = []
    group = fsdp.dist_index.get_outer_fsdp_group()

    def noting(name, send, *args, **kwargs):
        if kwargs.get("group") is group:
            given = args[0] if args else kwargs.get("input_tensor", kwargs.get("input"))
            assert given is not None
            sent.append((name, given.data_ptr()))
        return send(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name in (GATHER, SHARD, SUM):
            patch.setattr(torch.distributed, name, partial(noting, name, getattr(torch.distributed, name)))
        yield sent


def names(sent):
    return [name for name, _ in sent]


def run(training, *, last):
    training.fsdp.is_last_microbatch = last
    run_backward(training.fsdp, training.case)


@KINDS
@pytest.mark.parametrize(("outer", "reduction"), [("no_shard", SUM), ("optim", SHARD)])
def test_each_bucket_is_gathered_and_reduced_once_in_a_step(hybrid_ranks, kind, outer, reduction):
    with trained(kind, hybrid_ranks, outer) as training:
        buckets = len(training.fsdp.param_and_grad_buffer.parameter_groups)
        gathers = [GATHER] * buckets * (outer == "optim")
        with sent_between_instances(training.fsdp) as sent:
            run(training, last=False)
            assert names(sent) == gathers
            run(training, last=True)
            assert names(sent) == [*gathers, *[reduction] * buckets]
            training.fsdp.finish_grad_sync()
            training.fsdp.start_param_sync()
            run(training, last=True)
        assert names(sent) == 2 * [*gathers, *[reduction] * buckets]
        training.fsdp.finish_grad_sync()


@KINDS
def test_a_pass_that_runs_eagerly_sends_in_the_order_of_a_replay(hybrid_ranks, kind):
    with trained(kind, hybrid_ranks, "optim") as training:
        orders = []
        for mode in (training.model.train, training.model.eval):  # which graphs for training do not fit
            mode()
            with sent_between_instances(training.fsdp) as sent:
                training.step()
            orders.append(sent)
        assert orders[0] == orders[1]
        assert len(set(orders[0])) == len(orders[0]) > 0


def test_without_graphs_each_bucket_is_sent_when_its_unit_is(hybrid_ranks):
    with trained(DECODER, hybrid_ranks, "optim") as training:
        training.helper.delete_cuda_graphs()
        with sent_between_instances(training.fsdp) as sent:
            run(training, last=True)
            gathers = names(sent).count(GATHER)
        buckets = len(training.fsdp.param_and_grad_buffer.parameter_groups)
        assert gathers > buckets  # most are gathered for the backward pass, too
        assert names(sent)[-1] == SHARD
        assert names(sent).index(SHARD) < len(sent) - buckets
        training.fsdp.finish_grad_sync()
        training.helper.create_cudagraphs()


@KINDS
def test_weights_that_have_changed_are_gathered_anew(hybrid_ranks, kind):
    with trained(kind, hybrid_ranks, "optim") as training:
        buckets = len(training.fsdp.param_and_grad_buffer.parameter_groups)
        training.model.eval()
        with sent_between_instances(training.fsdp) as sent, torch.no_grad():
            for copies in (False, False, True):
                if copies:
                    training.fsdp.install_optimized_model_weights()
                run_evaluation(training)
        assert names(sent) == [GATHER] * 2 * buckets


def run_evaluation(training):
    with mock.patch.object(torch.Tensor, "backward"):
        run_backward(training.fsdp, training.case)


@RECORDED
def test_a_schedule_that_does_not_say_which_replay_is_the_last_is_an_error(hybrid_ranks, kind):
    with trained(kind, hybrid_ranks, "no_shard") as training:
        run(training, last=False)
        with pytest.raises(RuntimeError, match="--no-align-grad-reduce"):
            training.fsdp.start_grad_sync()
        run(training, last=True)
        training.fsdp.start_grad_sync()
        training.fsdp.finish_grad_sync()


@RECORDED
def test_a_capture_sends_nothing_in_graphs(hybrid_ranks, kind):
    with trained(kind, hybrid_ranks, "optim") as training:
        training.helper.delete_cuda_graphs()
        training.fsdp.param_and_grad_buffer.gathered_between_instances = False
        with sent_between_instances(training.fsdp) as sent:
            training.helper.create_cudagraphs()
        assert set(names(sent)) == {GATHER}  # before the warm-up


@contextmanager
def waits():
    """Note which stream waits for which event."""
    found = []
    wait_event = torch.cuda.Stream.wait_event

    def note(stream, event):
        found.append((stream, event))
        return wait_event(stream, event)

    with mock.patch.object(torch.cuda.Stream, "wait_event", note):
        yield found


def test_a_replay_waits_for_what_is_outside_of_units_and_an_eager_pass_for_all(hybrid_ranks):
    with trained(MODEL, hybrid_ranks, "optim") as training:
        gathers, groups = training.fsdp.all_gather_pipeline, training.fsdp.param_and_grad_buffer.parameter_groups
        bucket_of = {event: bucket for bucket, event in gathers.between_instances.items()}
        outside = {bucket for bucket, group in enumerate(groups) if group.fsdp_unit_id is None}
        begun: list[int] = []  # how often gathers have waited for the weights, by pass

        def awaited(mode):
            mode()
            with waits() as waited:
                run(training, last=False)
            begun.append(sum(stream is gathers.outer_fsdp_group_param_gather_stream for stream, _ in waited))
            return {bucket_of[event] for _, event in waited if event in bucket_of}

        assert outside
        for _ in range(2):  # steps
            assert awaited(training.model.train) == outside
            assert awaited(training.model.eval) == {*bucket_of.values()}
            assert awaited(training.model.train) == set()
            training.fsdp.finish_grad_sync()
        assert begun == [1, 0, 0] * 2


@RECORDED
def test_gradients_of_units_are_sent_in_another_dtype_from_two_buffers(hybrid_ranks, kind):
    case = graphed(kind, num_distributed_optimizer_instances=hybrid_ranks)
    with captured(case, Variant(case, sharding={"megatron_fsdp_grad_comm_dtype": torch.bfloat16})) as training:
        groups = training.fsdp.param_and_grad_buffer.parameter_groups
        assert sum(group.fsdp_unit_id is not None for group in groups) == 3
        with sent_between_instances(training.fsdp) as sent:
            run(training, last=True)
        training.fsdp.finish_grad_sync()
        assert len(sent) == len(groups)
        outside = sum(group.fsdp_unit_id is None for group in groups)
        assert len(set(sent)) == 2 + outside


def test_a_gather_that_failed_is_made_again(hybrid_ranks):
    with trained(MODEL, hybrid_ranks, "optim") as training:
        buckets = len(training.fsdp.param_and_grad_buffer.parameter_groups)
        failing = mock.patch.object(torch.distributed, GATHER, side_effect=torch.OutOfMemoryError)
        with failing, pytest.raises(torch.OutOfMemoryError):
            run(training, last=True)
        with sent_between_instances(training.fsdp) as sent:
            run(training, last=False)
        assert names(sent) == [GATHER] * buckets


def test_a_replay_that_an_exception_ended_leaves_no_event_to_wait_for(hybrid_ranks):
    with trained(MODEL, hybrid_ranks, "no_shard") as training:
        fsdp, hooks = training.fsdp, training.fsdp.fsdp_hooks
        with mock.patch.object(hooks.backward, "finish_backward", side_effect=ValueError), pytest.raises(ValueError):
            run(training, last=True)
        assert fsdp.grad_reduce_pipeline.replayed
        training.model.eval()
        with pytest.warns(UserWarning, match="an exception ended the last backward pass"):
            run(training, last=False)
        assert not fsdp.grad_reduce_pipeline.replayed
        training.model.train()
