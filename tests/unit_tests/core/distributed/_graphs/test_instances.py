"""Test that graphs communicate across HSDP replicas once per step, in the same order on all ranks."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch

from ..captured_training import captured, graphed
from ..fsdp_variants import run_backward

pytestmark = pytest.mark.sampled

MODEL, LAYER = "model", "layer"
KINDS = pytest.mark.parametrize("kind", [MODEL, LAYER])
GATHER, SHARD, SUM = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


@contextmanager
def trained(kind, instances, outer, **changes):
    """Yield a model with graphs of scope ``kind`` after one step.

    ``instances`` is the number of HSDP replicas, and ``outer`` the sharding strategy across them.
    """
    with captured(
        graphed(kind, num_distributed_optimizer_instances=instances, outer_dp_sharding_strategy=outer, **changes)
    ) as training:
        training.fsdp.is_last_microbatch = True
        training.step()
        yield training


@contextmanager
def sent_across_replicas(fsdp):
    """Collect the name and input address of each collective across HSDP replicas while in this context."""
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
def test_each_bucket_is_gathered_and_reduced_once_per_step(hybrid_ranks, kind, outer, reduction):
    with trained(kind, hybrid_ranks, outer) as training:
        buckets = len(training.fsdp.param_and_grad_buffer.parameter_groups)
        gathers = [GATHER] * buckets * (outer == "optim")
        with sent_across_replicas(training.fsdp) as sent:
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
def test_eager_passes_communicate_in_the_order_of_replays(hybrid_ranks, kind):
    with trained(kind, hybrid_ranks, "optim") as training:
        orders = []
        for mode in (training.model.train, training.model.eval):  # does not match the training graphs
            mode()
            with sent_across_replicas(training.fsdp) as sent:
                training.step()
            orders.append(sent)
        assert orders[0] == orders[1]
        assert len(set(orders[0])) == len(orders[0]) > 0


@KINDS
def test_changed_weights_are_gathered_again(hybrid_ranks, kind):
    with trained(kind, hybrid_ranks, "optim") as training:
        buckets = len(training.fsdp.param_and_grad_buffer.parameter_groups)
        training.model.eval()
        with sent_across_replicas(training.fsdp) as sent, torch.no_grad():
            for copies in (False, False, True):
                if copies:
                    training.fsdp.install_optimized_model_weights()
                run_evaluation(training)
        assert names(sent) == [GATHER] * 2 * buckets


def run_evaluation(training):
    with mock.patch.object(torch.Tensor, "backward"):
        run_backward(training.fsdp, training.case)


def test_schedules_must_mark_the_last_replay(hybrid_ranks):
    with trained(MODEL, hybrid_ranks, "no_shard") as training:
        run(training, last=False)
        with pytest.raises(RuntimeError, match="--no-align-grad-reduce"):
            training.fsdp.start_grad_sync()
        run(training, last=True)
        training.fsdp.start_grad_sync()
        training.fsdp.finish_grad_sync()


def test_graphs_do_not_communicate_across_replicas(hybrid_ranks):
    with trained(MODEL, hybrid_ranks, "optim") as training:
        training.helper.delete_cuda_graphs()
        training.fsdp.all_gather_pipeline.gathered_across_replicas = False
        with sent_across_replicas(training.fsdp) as sent:
            training.helper.create_cudagraphs()
        assert set(names(sent)) == {GATHER}  # before the warm-up


@contextmanager
def waits():
    """Collect a pair (stream, event) for each wait of a stream while in this context."""
    found = []
    wait_event = torch.cuda.Stream.wait_event

    def note(stream, event):
        found.append((stream, event))
        return wait_event(stream, event)

    with mock.patch.object(torch.cuda.Stream, "wait_event", note):
        yield found


def test_replays_wait_only_for_buckets_outside_of_units(hybrid_ranks):
    with trained(MODEL, hybrid_ranks, "optim") as training:
        gathers, groups = training.fsdp.all_gather_pipeline, training.fsdp.param_and_grad_buffer.parameter_groups
        bucket_of = {event: bucket for bucket, event in gathers.across_replicas.items()}
        outside = {bucket for bucket, group in enumerate(groups) if group.fsdp_unit_id is None}
        begun: list[int] = []  # number of waits for the weights in each pass

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


def test_interrupted_replay_leaves_no_event(hybrid_ranks):
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
