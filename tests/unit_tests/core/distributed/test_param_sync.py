"""Test parameter gathers and gradient reductions at the end of a step."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest

from .fsdp_variants import STRATEGIES, Variant, run_backward, small, upstream_class


def build(strategy, **sharding):
    return Variant(small(data_parallel_sharding_strategy=strategy), sharding=sharding).build().module


def gathered(fsdp, start, **arguments):
    """Call ``start``; return the arguments of its gathers, and whether modules then have the optimizer's parameters."""
    fsdp._replace_param_with_distributed_if_needed()
    fsdp.all_gather_pipeline.reset()
    with mock.patch.object(
        fsdp.all_gather_pipeline, "async_bucket_gather", wraps=fsdp.all_gather_pipeline.async_bucket_gather
    ) as gather:
        start(fsdp, **arguments)
    return [call.args or tuple(call.kwargs.values()) for call in gather.call_args_list], fsdp.is_param_fsdp_distributed


@pytest.mark.parametrize("arguments", [{}, {"force_sync": True}], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_start_param_sync_gathers_like_megatron_core(ranks, strategy, arguments):
    fsdp = build(strategy)
    upstream: Any = upstream_class()
    expected = gathered(fsdp, upstream.start_param_sync, **arguments)
    assert gathered(fsdp, type(fsdp).start_param_sync, **arguments) == expected
    assert bool(expected[0]) is (strategy != "no_shard")


@pytest.mark.parametrize(
    ("strategy", "refused"),
    [("optim_grads_params", False), ("optim_grads", False), ("optim", True), ("no_shard", True)],
)
def test_schedules_must_mark_the_last_micro_batch(ranks, strategy, refused):
    case = small(data_parallel_sharding_strategy=strategy)
    fsdp = Variant(case).build().module
    with mock.patch.object(fsdp.ddp_config, "overlap_grad_reduce", True):
        with fsdp.no_sync():  # as in later pipeline stages with a ``grad_sync_func``
            run_backward(fsdp, case)
        with pytest.raises(RuntimeError, match="--no-align-grad-reduce") if refused else nullcontext():
            fsdp.start_grad_sync()
        fsdp.finish_grad_sync()
        run_backward(fsdp, case)  # outside of ``no_sync``, as without a ``grad_sync_func``
        fsdp.start_grad_sync()
        fsdp.finish_grad_sync()
