"""What Megatron-FSDP gathers at the end of a step, and what it does not in a capture."""

from typing import Any
from unittest import mock

import pytest
import torch

from .fsdp_variants import STRATEGIES, Variant, small, upstream_class


def build(strategy, **sharding):
    return Variant(small(strategy=strategy), sharding=sharding).build().module


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
