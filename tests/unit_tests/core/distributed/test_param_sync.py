"""What Megatron-FSDP gathers at the end of a step, and what it does not in a capture."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from .fsdp_variants import STRATEGIES, Variant, run_backward, small, upstream_class


def build(strategy, **sharding):
    return Variant(small(data_parallel_sharding_strategy=strategy), sharding=sharding).build().module


def gathered(fsdp, start, **arguments):
    """Call ``start``; return what it gathers, and whether modules hold raw parameters then."""
    fsdp._replace_param_with_distributed_if_needed()
    fsdp.all_gather_pipeline.reset()
    with mock.patch.object(
        fsdp.all_gather_pipeline, "async_bucket_gather", wraps=fsdp.all_gather_pipeline.async_bucket_gather
    ) as gather:
        start(fsdp, **arguments)
    return [call.args or tuple(call.kwargs.values()) for call in gather.call_args_list], fsdp.is_param_fsdp_distributed


@pytest.mark.parametrize("arguments", [{}, {"force_sync": True}], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_what_megatron_core_gathers(ranks, strategy, arguments):
    fsdp = build(strategy)
    upstream: Any = upstream_class()
    expected = gathered(fsdp, upstream.start_param_sync, **arguments)
    assert gathered(fsdp, type(fsdp).start_param_sync, **arguments) == expected
    assert bool(expected[0]) is (strategy != "no_shard")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_gathered_or_exchanged_in_a_capture(ranks, strategy):
    fsdp = build(strategy)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        assert gathered(fsdp, type(fsdp).start_param_sync) == ([], True)


def test_a_model_whose_whole_pass_is_captured_exchanges_its_parameters_there(ranks):
    fsdp = build("optim_grads_params", fsdp_all_gather_in_start_param_sync=False)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        assert gathered(fsdp, type(fsdp).start_param_sync) == ([], False)


@pytest.mark.parametrize(
    ("strategy", "refused"),
    [("optim_grads_params", False), ("optim_grads", False), ("optim", True), ("no_shard", True)],
)
def test_a_schedule_that_does_not_say_which_micro_batch_is_the_last_one_is_refused_where_it_must(
    ranks, strategy, refused
):
    case = small(data_parallel_sharding_strategy=strategy)
    fsdp = Variant(case).build().module
    with mock.patch.object(fsdp.ddp_config, "overlap_grad_reduce", True):
        with fsdp.no_sync():  # as all pipeline stages but the first when they have a ``grad_sync_func``
            run_backward(fsdp, case)
        with pytest.raises(RuntimeError, match="--no-align-grad-reduce") if refused else nullcontext():
            fsdp.start_grad_sync()
        fsdp.finish_grad_sync()
        run_backward(fsdp, case)  # outside of ``no_sync``, as where they have none
        fsdp.start_grad_sync()
        fsdp.finish_grad_sync()
