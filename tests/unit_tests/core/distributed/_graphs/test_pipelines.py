"""Test that the gather and reduction pipelines recover from a failure, without communicating."""

from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch.distributed as dist

from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs import collectives
from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.pipelines import (
    drop_collectives,
    release_all,
    take_back_unlaunched,
    take_places,
)
from megatron_fsdp_cuda_graphs.cpu_backend.distributed import HeldWork

from ..captured_training import in_use
from ..fsdp_variants import Variant, small

# Launches a batch of all-gathers; the first name is used by torch 2.13 and later, the second by earlier versions.
COALESCED_GATHER = next(
    name
    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    if hasattr(dist.ProcessGroup, name)
)


class Fault(Exception):
    """Raised by a failing collective."""


@pytest.fixture
def fsdp(ranks):
    wrapped = Variant(small(layers=3)).build().module
    wrapped._replace_param_with_raw_if_needed()
    return wrapped


@pytest.fixture
def layers(fsdp):
    return list(fsdp.module.decoder.layers)


def fail(*args, **kwargs):
    raise Fault


def gather(fsdp, layer):
    fsdp.all_gather_and_wait_parameters_ready(list(layer.parameters()), prefetch=False)


def status_of(fsdp, layer):
    buckets = {fsdp.param_and_grad_buffer.param_to_param_group[param] for param in layer.parameters()}
    return {fsdp.all_gather_pipeline.bucket_status[bucket, False].name for bucket in buckets}


# The gather fails before it reaches torch, at launch, or during the wait.
@pytest.mark.parametrize(
    ("owner", "name", "launched"),
    [
        (dist, "all_gather_into_tensor", False),
        (dist.ProcessGroup, COALESCED_GATHER, False),
        (HeldWork, "wait", True),
    ],
)
def test_failed_gather_can_be_launched_again(fsdp, layers, owner, name, launched):
    with mock.patch.object(owner, name, fail), pytest.raises(Fault):
        gather(fsdp, layers[0])
    take_back_unlaunched(fsdp)
    assert status_of(fsdp, layers[0]) == {"READY_TO_USE" if launched else "EMPTY"}
    assert bool(in_use(fsdp)[0]) == launched
    with mock.patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as launches:
        gather(fsdp, layers[0])
    assert bool(launches.call_count) != launched
    assert status_of(fsdp, layers[0]) == {"READY_TO_USE"}
    release_all(fsdp)
    assert in_use(fsdp) == [{}, {}]


def test_collectives_finish_and_gradient_buckets_are_freed(fsdp, layers):
    fsdp.all_gather_pipeline.all_gather_params(list(layers[0].parameters()))
    for param in layers[1].parameters():
        param.main_grad = param.get_main_grad()
    assert all(in_use(fsdp))
    with mock.patch.object(dist.ProcessGroup, COALESCED_GATHER, fail):
        drop_collectives(fsdp)
    assert fsdp.all_gather_pipeline.param_gather_event_map == {}
    assert status_of(fsdp, layers[0]) == {"READY_TO_USE"}
    assert in_use(fsdp)[1] == {}
    assert all(param.main_grad is None for param in layers[1].parameters())


@pytest.mark.parametrize("launched", [False, True])
def test_communicator_is_set_up_again_unless_launched(fsdp, launched):
    buckets, done = [bucket for unit in fsdp.graphs.units.values() for bucket in unit.buckets], set[object]()
    reduce = mock.Mock(side_effect=[Fault, True])
    with (
        mock.patch.object(fsdp.grad_reduce_pipeline, "_bucket_group_gradient_reduce", reduce),
        mock.patch.object(collectives, "launches_of", return_value=lambda: launched or reduce.call_count > 1),
    ):
        with pytest.raises(Fault):
            collectives.set_up_communicators(fsdp, buckets, done)
        collectives.set_up_communicators(fsdp, buckets, done)
    assert reduce.call_count == (1 if launched else 2)


def places_of(fsdp):
    """Return the bucket addresses of each unit; allocate and free one bucket after the other to read them."""
    places: dict[int, set[int]] = {}
    for group in fsdp.param_and_grad_buffer.parameter_groups:
        for buffer in (group.model_weight_buffer, group.main_grad_buffer) if group.fsdp_unit_id is not None else ():
            places.setdefault(group.fsdp_unit_id, set()).add(buffer.fetch_bucket().data.data_ptr())
            buffer.free_bucket_storage()
    return list(places.values())


def assert_neighbors_share_nothing(places):
    assert len(places) == 4
    assert all(unit.isdisjoint(following) for unit, following in pairwise(places))


SOME_EXPERTS = small(layers=4, experts=4, moe_layer_freq=(0, 1, 1, 0))
ONE_POOL = replace(SOME_EXPERTS, config=(*SOME_EXPERTS.config, ("megatron_fsdp_max_pool_double_buffer", True)))


@pytest.mark.parametrize("case", [small(layers=4), SOME_EXPERTS, ONE_POOL], ids=str)
def test_neighboring_units_use_different_buffers(ranks, case):
    fsdp = Variant(case).build().module
    take_places(fsdp)
    assert in_use(fsdp) == [{}, {}]
    assert_neighbors_share_nothing(places_of(fsdp))
