"""fsdp_joined_collectives: what launches a collective is given to ``join``, and launches it once."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp import fsdp_joined_collectives
from megatron.core.distributed.fsdp.src.megatron_fsdp.fsdp_joined_collectives import joined_collectives
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import (
    AllGatherPipeline,
    GradReducePipeline,
)
from megatron.core.transformer._cuda_graphs.te.agreement import CaptureAgreement

from .captured_training import captured, graphed
from .fsdp_variants import Variant, small
from .test_fsdp_dropped_collectives import Fault
from .test_fsdp_model import MODEL, capture_again

PHASES = "forward", "backward"


@pytest.fixture
def fsdp(ranks):
    wrapped = Variant(small(layers=3)).build().module
    wrapped._replace_param_with_raw_if_needed()
    return wrapped


def gather(fsdp):
    params = list(fsdp.module.decoder.layers[0].parameters())
    fsdp.all_gather_and_wait_parameters_ready(params, prefetch=False)


def refuse(launch):
    raise Fault


def test_nothing_is_gathered_where_ranks_do_not_agree(fsdp):
    with joined_collectives(fsdp, refuse), pytest.raises(Fault):
        gather(fsdp)
    assert {status.name for status in fsdp.all_gather_pipeline.bucket_status.values()} <= {"EMPTY", "PRESERVED"}


def test_nothing_is_reduced_where_ranks_do_not_agree(fsdp):
    reductions = fsdp.grad_reduce_pipeline
    with joined_collectives(fsdp, refuse), pytest.raises(Fault):
        reductions._bucket_group_gradient_reduce([0], async_op=True)
    assert reductions.grad_reduce_queue == []


@pytest.mark.parametrize("launched", [False, True])
def test_a_reduction_that_failed_is_launched_again_unless_it_was(fsdp, launched):
    def twice(launch):
        with pytest.raises(Fault):
            launch()
        launch()

    reduce = mock.Mock(side_effect=[Fault, True])
    with (
        mock.patch.object(GradReducePipeline, "_bucket_group_gradient_reduce", reduce),
        mock.patch.object(fsdp_joined_collectives, "launches_of", return_value=lambda: launched),
        joined_collectives(fsdp, twice),
    ):
        fsdp.grad_reduce_pipeline._bucket_group_gradient_reduce([0], async_op=True)
    assert reduce.call_args_list == [mock.call([0], async_op=True)] * (1 if launched else 2)


@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_collectives_are_launched_as_before(fsdp, fails):
    pipelines = fsdp.all_gather_pipeline, fsdp.grad_reduce_pipeline
    before = [dict(vars(pipeline)) for pipeline in pipelines]
    with pytest.raises(Fault) if fails else nullcontext(), joined_collectives(fsdp, refuse):
        if fails:
            gather(fsdp)
    assert [set(vars(pipeline)) for pipeline in pipelines] == [set(names) for names in before]


def test_ranks_agree_before_every_collective_of_the_whole_models_warm_up(ranks):
    events: list[str] = []

    def noting(what, call):
        def note(*args, **kwargs):
            if not torch.cuda.is_current_stream_capturing():
                events.append(what)
            return call(*args, **kwargs)

        return note

    def vote(agreement, where, module=None):
        if not torch.cuda.is_current_stream_capturing():
            events.append(where)

    gather, reduce = AllGatherPipeline.all_gather_params, GradReducePipeline._bucket_group_gradient_reduce
    with (
        captured(graphed(MODEL)) as training,
        mock.patch.object(AllGatherPipeline, "all_gather_params", noting("gather", gather)),
        mock.patch.object(GradReducePipeline, "_bucket_group_gradient_reduce", noting("reduce", reduce)),
        mock.patch.object(CaptureAgreement, "begin", vote),
    ):
        training.helper.delete_cuda_graphs()
        capture_again(training)
    launches = [i for i, event in enumerate(events) if event in ("gather", "reduce")]
    votes = [events[i - 1] for i in launches]
    assert events == [event for i in launches for event in events[i - 1 : i + 1]] + ["after the last layer"]
    assert sorted(set(votes), key=votes.index) == [f"the whole model, {w}" for w in ("before forward", *PHASES)]
    reduced = len(training.fsdp.param_and_grad_buffer.parameter_groups)
    assert events.count("reduce") == reduced
