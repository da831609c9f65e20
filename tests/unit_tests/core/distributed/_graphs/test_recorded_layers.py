"""Test graphs mixed with eager passes of the same layers, and memory that graphs share with the optimizer."""

from unittest import mock

import pytest

from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.collectives import RecordedReduction
from megatron.core.distributed.fsdp.src.megatron_fsdp.optimizer_gradients import GradientStorages

from ..captured_training import WARMED_UP, captured, graphed
from ..fsdp_variants import small


def test_eager_passes_reduce_the_buckets_of_a_layer_together(ranks):
    with captured(graphed("model", experts=4, moe_expert_capacity_factor=1.0)) as training:
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


def test_optimizer_gradients_share_memory_of_activations(ranks):
    case = small(layers=4, holds="model", warmup=WARMED_UP)
    methods = [mock.patch.object(GradientStorages, name) for name in ("reserve", "adopt", "detach")]
    with methods[0] as reserve, methods[1] as adopt, methods[2] as detach, captured(case) as training:
        assert (reserve.call_count, adopt.call_count) == (1, 1)
        assert not detach.called
        training.fsdp.graphs.forget_graphs(training.layers)
        assert detach.called
