"""Test graphs of all decoder layers mixed with eager passes of the same layers."""

from unittest import mock

import pytest
import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.collectives import RecordedReduction
from megatron.core.distributed.fsdp.src.megatron_fsdp.optimizer_gradients import GradientStorages
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import AllGatherPipeline

from ..captured_training import WARMED_UP, captured, graphed
from ..fsdp_variants import small


def test_recorded_layers_prefetch_only_each_other(ranks):
    gathered = []
    gather = AllGatherPipeline.async_bucket_gather

    def note(pipeline, bucket_id, bwd):
        if torch.cuda.is_current_stream_capturing():
            gathered.append(bucket_id)
        return gather(pipeline, bucket_id, bwd)

    noting = mock.patch.object(AllGatherPipeline, "async_bucket_gather", note)
    with noting, captured(graphed("decoder", mtp=1)) as training:
        units = training.fsdp.graphs.units
        buckets = [bucket for layer in training.layers for bucket in units[layer].buckets]
    assert gathered[: 2 * len(buckets)] == [*buckets, *reversed(buckets)]


def test_eager_passes_gather_like_replays(ranks):
    with captured(graphed("decoder", mtp=1)) as training:
        hooks, gathers = training.fsdp.fsdp_hooks, training.fsdp.all_gather_pipeline
        groups = training.fsdp.param_and_grad_buffer.parameter_groups
        forward = [bucket for layer in training.layers for bucket in hooks.graphs.units[layer].buckets]
        training.layers[1].mlp.register_forward_hook(lambda *_: None)
        with mock.patch.object(gathers, "async_bucket_gather", wraps=gathers.async_bucket_gather) as gather:
            training.step()
        gathered = [bucket for bucket, _ in (call.args for call in gather.call_args_list)]
        # The multi-token prediction layer replays its own graph; its prefetch of the last layer in backward is useless.
        of_units = [bucket for bucket in gathered if groups[bucket].fsdp_unit_id is not None]
        assert of_units == [*forward, forward[-1], *reversed(forward)]


@pytest.mark.parametrize("holds", ["decoder", "model"])
def test_eager_passes_reduce_the_buckets_of_a_layer_together(ranks, holds):
    with captured(graphed(holds, experts=4, moe_expert_capacity_factor=1.0)) as training:
        units, reductions = training.fsdp.graphs.units, training.fsdp.grad_reduce_pipeline
        training.layers[1].mlp.register_forward_hook(lambda *_: None)
        with mock.patch.object(reductions, "reduce_gradients", wraps=reductions.reduce_gradients) as reduce:
            training.step()
        together = [{*call.args[0]} for call in reduce.call_args_list]
        for layer in training.layers:
            assert len(units[layer].buckets) == 2
            assert {*units[layer].params} in together


@pytest.mark.parametrize("modules", [[], ["attn", "moe_router"], ["moe_router"]], ids=str)
def test_eager_layers_reduce_in_the_order_of_replays(ranks, modules):
    parts = {"modules": modules} if modules else {"moe_expert_capacity_factor": 1.0}
    with captured(graphed("layer", experts=4, **parts)) as training:
        launch, reduced = RecordedReduction.launch, []

        def noting(reduction):
            reduced.append(reduction.buckets)
            return launch(reduction)

        with mock.patch.object(RecordedReduction, "launch", noting):
            training.step()
            replayed, reduced = reduced, []
            assert len(replayed) == 2 * len(training.layers)
            for layer in training.layers[1:]:
                layer.mlp.router.register_forward_hook(lambda *_: None)
            training.step()
        assert reduced == replayed


@pytest.mark.parametrize("mtp", [None, 1])
def test_optimizer_gradients_share_memory_of_activations(ranks, mtp):
    case = small(layers=4, holds="decoder", warmup=WARMED_UP, mtp=mtp)
    methods = [mock.patch.object(GradientStorages, name) for name in ("reserve", "adopt", "detach")]
    with methods[0] as reserve, methods[1] as adopt, methods[2] as detach, captured(case) as training:
        assert (reserve.call_count, adopt.call_count) == ((0, 0) if mtp else (1, 1))
        assert not detach.called
        training.fsdp.graphs.forget_graphs(training.layers)
        assert detach.called
