"""Plans of graphed units: which units have one, what they gather, and what is left of them."""

from dataclasses import replace
from unittest import mock

import pytest

from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.pipelines import release_all
from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.recorded_collectives import RecordedWork
from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.runners import Graphed, Planned
from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.unit_plan import UnitPlan
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import PrefetchOrder
from megatron.core.utils import get_attr_wrapped_model

from ..fsdp_variants import STRATEGIES, Variant, small

ORDERS = {"forward": PrefetchOrder.FORWARD_PASS_ORDER, "backward": PrefetchOrder.BACKWARD_PASS_ORDER}


def layers_of(fsdp):
    return list(get_attr_wrapped_model(fsdp.module, "decoder").layers)


def unit_of(fsdp, layer=0):
    return fsdp.fsdp_hooks.context.units[layers_of(fsdp)[layer]]


def has_sinks(variant):
    """Whether graphs of its layers take gradients, and have plans."""
    fsdp = variant.build().module
    layers = layers_of(fsdp)
    with fsdp.graphs.capture_graphs(layers):
        sinks = fsdp.graphs.gradient_sinks(layers, whole=True)
    has = all(sink is not None for sink in sinks)
    assert has or sinks == [None] * len(layers)
    runners = [fsdp.fsdp_hooks.registry.graphed[layer] for layer in layers]
    assert {type(runner) for runner in runners} == {Planned if has else Graphed}
    assert not has or [sink.runner for sink in sinks] == runners
    return has


# ---------------------------------------------------------------------------------------------- which units have one


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_units_whose_parameters_are_sharded_can_have_a_plan(ranks, strategy):
    assert has_sinks(Variant(small(strategy=strategy))) is (strategy == "optim_grads_params")


@pytest.mark.parametrize(
    "variant",
    [Variant(small(double_buffer=False)), Variant(fsdp={"report_nan_in_param_grad": True})],
    ids=["no double buffer", "NaN check"],
)
def test_units_without_fixed_addresses_or_whose_gradients_are_looked_at_have_none(ranks, variant):
    assert not has_sinks(variant)


def test_units_with_fp8_parameters_have_none_and_can_be_recorded_unless_transposes_are_gathered(ranks):
    fsdp = Variant().build().module
    plans, unit = fsdp.fsdp_hooks.context.plans, unit_of(fsdp)
    assert plans.fits(unit)
    quantized = replace(unit, float8_params=unit.params[:1])
    assert plans.records(quantized) and not plans.fits(quantized)
    group = fsdp.param_and_grad_buffer.parameter_groups[unit.buckets[0]]
    with mock.patch.object(group, "transpose_weight_buffer", object()):
        assert not plans.records(quantized)


@pytest.mark.parametrize(("mixing", "has"), [("0", False), ("1", True)])
def test_no_collective_is_recorded_where_nccl_may_not_mix_it_with_others(ranks, monkeypatch, mixing, has):
    monkeypatch.setenv("NCCL_GRAPH_MIXING_SUPPORT", mixing)
    assert has_sinks(Variant()) is has


# ----------------------------------------------------------------------------------------------------- what it gathers


def capture(fsdp, layers):
    """Make plans for ``layers``; nothing is recorded of the layers themselves."""
    with fsdp.graphs.capture_graphs(layers):
        pass


def planned(fsdp, layer, direction):
    """The buckets of the plan's all-gathers, the layer's own first."""
    plan = fsdp.fsdp_hooks.registry.graphed[layer].plan
    return [bucket for group in plan.gathers[direction] for bucket, _ in group.keys]


def gathered_by_megatron_core(fsdp, layer, direction):
    """The buckets that megatron-core gathers before a pass of ``layer``."""
    pipeline = fsdp.all_gather_pipeline
    with mock.patch.object(pipeline, "async_bucket_gather", wraps=pipeline.async_bucket_gather) as gather:
        fsdp.all_gather_and_wait_parameters_ready(
            list(layer.parameters()), prefetch_order=ORDERS[direction], bwd=direction == "backward"
        )
    release_all(fsdp)
    return [call.args[0] for call in gather.call_args_list]


@pytest.mark.parametrize("ahead", [1, 10_000, 10**9])
@pytest.mark.parametrize("direction", ORDERS)
@pytest.mark.parametrize("changes", [{}, {"experts": 2}, {"dtype": "bf16", "layers": 4}], ids=str)
def test_the_buckets_are_those_that_megatron_core_gathers_and_then_prefetches_in_its_order(
    ranks, changes, direction, ahead
):
    fsdp = Variant(small(**{"layers": 3, **changes})).build(graphs=True).module
    fsdp.suggested_AG_prefetch_size = ahead
    layers = layers_of(fsdp)
    fsdp._replace_param_with_raw_if_needed()
    capture(fsdp, layers)
    for layer in layers:
        own = sorted({fsdp.param_and_grad_buffer.param_to_param_group[param] for param in layer.parameters()})
        gathered = gathered_by_megatron_core(fsdp, layer, direction)
        assert planned(fsdp, layer, direction) == [*own, *(bucket for bucket in gathered if bucket not in own)]
    assert len(planned(fsdp, layers[1], direction)) > len(own)  # something is prefetched


@pytest.mark.parametrize("direction", ORDERS)
def test_an_eager_pass_gathers_by_the_plan_of_the_replays_of_other_ranks(ranks, direction):
    fsdp = Variant(small(layers=4, experts=2, moe_layer_freq=[0, 1, 0, 1])).build(graphs=True).module
    layers = layers_of(fsdp)
    fsdp._replace_param_with_raw_if_needed()
    capture(fsdp, layers)
    registry = fsdp.fsdp_hooks.registry
    plans = {layer: registry.graphed[layer].plan for layer in layers}
    for layer in layers:
        with mock.patch.object(UnitPlan, "gather", autospec=True, side_effect=UnitPlan.gather) as gather:
            registry.of(layer).gather(direction)
        assert gather.call_args_list == [mock.call(plans[layer], direction)]
        release_all(fsdp)


@pytest.mark.parametrize("direction", ORDERS)
def test_an_eager_pass_gathers_in_the_order_of_replays_without_plans(ranks, monkeypatch, direction):
    monkeypatch.setenv("NCCL_GRAPH_MIXING_SUPPORT", "0")
    fsdp = Variant(small(layers=4)).build(graphs=True).module
    layers = layers_of(fsdp)
    fsdp._replace_param_with_raw_if_needed()
    capture(fsdp, layers)
    registry, pipeline = fsdp.fsdp_hooks.registry, fsdp.all_gather_pipeline
    for layer in layers:
        gathered = []
        for runner in registry.graphed[layer], registry.of(layer):
            with mock.patch.object(pipeline, "async_bucket_gather", wraps=pipeline.async_bucket_gather) as gather:
                runner.gather(direction)
            gathered.append([call.args[0] for call in gather.call_args_list])
            release_all(fsdp)
        assert type(registry.graphed[layer]) is Graphed
        assert gathered[0] == gathered[1]


# ----------------------------------------------------------------------------------------------------------- the end


def test_forgotten_units_leave_no_recorded_collective(ranks):
    fsdp = Variant(small(layers=3)).build(graphs=True).module
    layers, made = layers_of(fsdp), []
    make = RecordedWork.__init__

    def noting(work, *args):
        made.append(work)
        make(work, *args)

    with mock.patch.object(RecordedWork, "__init__", noting):
        capture(fsdp, layers)
    assert len(made) == 2 * len(layers)  # an all-gather and a reduction for each
    fsdp.graphs.forget_graphs(layers[1:2])
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        made[2]._graph.replay()
    assert [
        group.group not in group.recordings
        for group in fsdp.fsdp_hooks.registry.graphed[layers[0]].plan.gathers["forward"]
    ] == [
        False,
        True,
    ]
    assert len(fsdp.grad_reduce_pipeline.recorded) == 2
    fsdp.graphs.forget_graphs(layers)
    for work in made:
        assert work._graph.op_count == 0
    assert fsdp.grad_reduce_pipeline.recorded == {}
    assert fsdp.fsdp_hooks.registry.graphed == {}
    assert fsdp.graphs.recorded_collectives() == 0


def freeze_first_parameters(model):
    for layer in model.decoder.layers:
        next(layer.parameters()).requires_grad = False


def test_a_forgotten_unit_whose_first_bucket_is_frozen_is_reduced_eagerly(ranks):
    fsdp = Variant(small(layers=3), change=freeze_first_parameters).build(graphs=True).module
    unit = unit_of(fsdp)
    assert [bool(fsdp.param_and_grad_buffer.parameter_groups[b].main_grad_buffer) for b in unit.buckets] == [
        False,
        True,
    ]
    capture(fsdp, layers_of(fsdp))
    assert len(fsdp.grad_reduce_pipeline.recorded) == 3
    fsdp.graphs.forget_graphs(layers_of(fsdp))
    assert fsdp.grad_reduce_pipeline.recorded == {}


def test_a_unit_whose_neighbour_was_forgotten_prefetches_it_eagerly(ranks):
    fsdp = Variant(small(layers=3)).build(graphs=True).module
    layers = layers_of(fsdp)
    capture(fsdp, layers)
    fsdp.graphs.forget_graphs(layers[1:2])
    layers[0].replaying = "training"
    fsdp.start_param_sync()
    pipeline = fsdp.all_gather_pipeline
    with mock.patch.object(pipeline, "async_bucket_gather", wraps=pipeline.async_bucket_gather) as gather:
        fsdp.fsdp_hooks.unshard_for_forward(layers[0])
    assert [call.args[0] for call in gather.call_args_list] == unit_of(fsdp, 1).buckets
    del layers[0].replaying
