"""Test layer graphs under Megatron-FSDP: gathers, gradients, moved buffers and cleanup."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.pipelines import release_all
from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.runners import PartOfModule, ReplayedRunner
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import PrefetchOrder
from megatron.core.transformer._cuda_graphs.errors import ChangedSinceCaptureError

from ..captured_training import FLAGS, in_use
from ..fsdp_variants import STRATEGIES, Variant, small

CASE = small(layers=4)
DOUBLE_BUFFERED = Variant(CASE)


@pytest.fixture
def fsdp(ranks):
    return DOUBLE_BUFFERED.build(graphs=True).module


@pytest.fixture
def layers(fsdp):
    return list(fsdp.module.decoder.layers)


def forward_of(hooks, layer):
    """Run the hooks around a captured forward pass."""
    hooks.unshard_for_forward(layer)
    hooks.release_after_forward(layer)


def backward_of(hooks, layer, *, fused=()):
    """Run the hooks around a captured backward pass in which fused kernels write ``main_grad`` of ``fused``."""
    hooks.unshard_for_backward(layer)
    for param in fused:
        param.main_grad = param.get_main_grad()
        param.grad_added_to_main_grad = True
    hooks.release_after_backward(layer)


def capture(fsdp, layers, *, fused=()):
    """Run the hooks of all layers as in a capture."""
    hooks = fsdp.fsdp_hooks
    with fsdp.graphs.layer_capture(layers):
        for layer in layers:
            forward_of(hooks, layer)
        for layer in reversed(layers):
            params = [layer.get_parameter(name) for name in fused]
            backward_of(hooks, layer, fused=params)


@contextmanager
def replaying(fsdp, layers, direction="backward"):
    """Yield Megatron-FSDP's hooks in the state of a pass in which ``layers`` replay their graphs."""
    for layer in layers:
        layer.replaying = fsdp.graphs.layers.get(layer)
    fsdp.start_param_sync()
    if direction == "backward":
        fsdp.pre_backward()
    try:
        yield fsdp.fsdp_hooks
    finally:
        fsdp.fsdp_hooks.backward.close()
        for layer in layers:
            del layer.replaying


def test_gradients_computed_during_capture_are_ignored(fsdp, layers):
    with fsdp.graphs.layer_capture(layers):
        param = layers[0].mlp.linear_fc1.weight
        param.grad = torch.ones_like(param)
        fsdp.fsdp_hooks.handle_gradient(param)
        assert param.grad is not None
        assert fsdp.grad_reduce_pipeline.grad_reduce_queue == []
        assert in_use(fsdp)[1] == {}
        param.grad = None


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_moved_parameter_is_named_with_the_flags(fsdp, layers, direction):
    capture(fsdp, layers)
    with replaying(fsdp, layers, direction) as hooks:
        gathers, moved = fsdp.all_gather_pipeline, layers[1].mlp.linear_fc1.weight
        wait = gathers.wait_bucket_ready

        def gathered_elsewhere(*args, **kwargs):
            wait(*args, **kwargs)
            moved.data = moved.data.clone()

        name = r"decoder\.layers\.1\.mlp\.linear_fc1\.weight "
        elsewhere = mock.patch.object(gathers, "wait_bucket_ready", gathered_elsewhere)
        with elsewhere, pytest.raises(ChangedSinceCaptureError, match=name) as error:
            getattr(hooks, f"unshard_for_{direction}")(layers[1])
    assert all(flag in str(error.value) for flag in FLAGS)


def test_unit_out_of_order_is_detected(fsdp, layers):
    capture(fsdp, layers)
    with replaying(fsdp, layers, "forward") as hooks:
        # The second unit occupies the buffer that the fourth used during capture.
        fsdp.all_gather_and_wait_parameters_ready(list(layers[1].parameters()), prefetch=False)
        with pytest.raises(ChangedSinceCaptureError, match=r"decoder\.layers\.3\..* .* out of turn"):
            hooks.unshard_for_forward(layers[3])


FUSED = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")


def test_moved_main_gradient_is_named_with_the_flags(fsdp, layers):
    capture(fsdp, layers, fused=FUSED)
    with replaying(fsdp, layers) as hooks:
        moved = layers[3].mlp.linear_fc2.weight
        elsewhere = mock.patch.object(moved, "get_main_grad", return_value=torch.zeros_like(moved))
        name = r"main gradient of decoder\.layers\.3\.mlp\.linear_fc2\.weight"
        with elsewhere, pytest.raises(ChangedSinceCaptureError, match=name) as e:
            hooks.unshard_for_backward(layers[3])
    assert all(flag in str(e.value) for flag in FLAGS)


def test_gradients_written_by_a_graph_are_kept(fsdp, layers):
    capture(fsdp, layers, fused=FUSED)
    with replaying(fsdp, layers) as hooks:
        hooks.unshard_for_backward(layers[3])
        fused, plain = layers[3].mlp.linear_fc1.weight, layers[3].mlp.linear_fc1.bias
        fused.main_grad.fill_(3.0)  # as written by the graph
        for param in (fused, plain):
            param.grad = torch.full_like(param, 5.0)  # a placeholder for fused parameters
            hooks.handle_gradient(param)
        hooks.release_after_backward(layers[3])
        assert fused.main_grad.unique().tolist() == [3.0]
        assert plain.main_grad.unique().tolist() == [5.0]
        assert fused.grad is None


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_graphed_layer_gathers_for_its_children(ranks, strategy, direction):
    variant = Variant(
        small(data_parallel_sharding_strategy=strategy), fsdp={"enable_fine_grained_param_gather_hook": True}
    )
    fsdp = variant.build(graphs=True).module
    layer = fsdp.module.decoder.layers[0]
    with fsdp.graphs.layer_capture([layer]):
        pass
    layer.replaying = fsdp.graphs.layers[layer]
    fsdp.start_param_sync()
    gathers, buffer = fsdp.all_gather_pipeline, fsdp.param_and_grad_buffer
    with mock.patch.object(gathers, "wait_bucket_ready", wraps=gathers.wait_bucket_ready) as wait:
        getattr(fsdp.fsdp_hooks, f"unshard_for_{direction}")(layer)
    assert {call.args[0] for call in wait.call_args_list} == {
        buffer.param_to_param_group[param] for param in layer.parameters()
    }


ORDERS = {"forward": PrefetchOrder.FORWARD_PASS_ORDER, "backward": PrefetchOrder.BACKWARD_PASS_ORDER}


def gathered(fsdp, gather):
    """Return the unit buckets that ``gather()`` gathers, and release all buckets afterwards."""
    groups, status = fsdp.param_and_grad_buffer.parameter_groups, fsdp.all_gather_pipeline.bucket_status
    for group in groups:
        if group.fsdp_unit_id is None:
            fsdp.all_gather_and_wait_parameters_ready(group.params, prefetch=False)
    gather()
    ready = [bucket for (bucket, _), each in status.items() if each.name in ("COMMUNICATING", "READY_TO_USE")]
    release_all(fsdp)
    return [bucket for bucket in ready if groups[bucket].fsdp_unit_id is not None]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", [CASE, small(layers=4, experts=4)], ids=["dense", "MoE"])
def test_replays_gather_like_megatron_core(ranks, case, direction):
    fsdp = Variant(case).build(graphs=True).module
    layers = list(fsdp.module.decoder.layers)
    capture(fsdp, layers)
    fsdp._replace_param_with_raw_if_needed()
    gather = fsdp.all_gather_and_wait_parameters_ready
    options = {"prefetch_order": ORDERS[direction], "bwd": direction == "backward"}
    for layer in layers:

        def replay(layer=layer):
            with mock.patch.object(fsdp.all_gather_pipeline, "async_bucket_gather") as eagerly:
                fsdp.graphs.layers[layer].gather(direction)
            assert not eagerly.called

        expected = gathered(fsdp, partial(gather, list(layer.parameters()), **options))
        assert gathered(fsdp, replay) == expected


def has_collectives(variant):
    """Return whether a layer capture of ``variant`` records collectives."""
    fsdp = variant.build().module
    layers = list(fsdp.module.decoder.layers)
    for whole, kind in ((False, PartOfModule), (True, ReplayedRunner)):
        with fsdp.graphs.layer_capture(layers, whole) as owners:
            pass
        has = bool(fsdp.all_gather_pipeline.recorded or fsdp.grad_reduce_pipeline.recorded)
        assert {type(owner) for owner in owners} == {kind if has else type(None)}
        fsdp.graphs.forget_graphs(layers)
    return has


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_of_sharded_units_are_recorded(ranks, strategy):
    assert has_collectives(Variant(small(data_parallel_sharding_strategy=strategy))) is (
        strategy == "optim_grads_params"
    )


@pytest.mark.parametrize(
    "variant",
    [Variant(small(fsdp_double_buffer=False)), Variant(fsdp={"report_nan_in_param_grad": True})],
    ids=["no double buffer", "NaN check"],
)
def test_collectives_without_fixed_addresses_are_not_recorded(ranks, variant):
    assert not has_collectives(variant)


@pytest.mark.parametrize(("mixing", "has"), [("0", False), ("1", True)])
def test_no_collective_is_recorded_without_nccl_graph_mixing(ranks, monkeypatch, mixing, has):
    monkeypatch.setenv("NCCL_GRAPH_MIXING_SUPPORT", mixing)
    assert has_collectives(Variant()) is has


def taken(fsdp, *, whole=True, unused=()):
    """Return the names of the parameters whose ``main_grad`` the graphs of the first layer write.

    Args:
        whole: Whether the whole layer is captured, not only a part.
        unused: Names of parameters without a gradient.
    """
    layer = fsdp.module.decoder.layers[0]
    with fsdp.graphs.layer_capture([layer], whole) as (owner,):
        fsdp.fsdp_hooks.unshard_for_backward(layer)
        names, params = zip(*layer.named_parameters(), strict=True)
        grads = [
            None if name in unused else torch.full_like(param, 5.0) for name, param in zip(names, params, strict=True)
        ]
        left = owner.consume_gradients(params, grads)
        values = {}
        for name, param, grad, back in zip(names, params, grads, left, strict=True):
            if getattr(param, "main_grad", None) is None:
                assert back is grad
            else:
                assert back is None
                values[name] = param.main_grad.unique().item()
        fsdp.fsdp_hooks.release_after_backward(layer)
    assert values == {name: 0.0 if name in unused else 5.0 for name in values}
    return set(values)


FC1 = "mlp.linear_fc1.weight"


@pytest.mark.parametrize("mark", ["skip_backward_post_hook", "_is_shared"])
def test_gradients_completed_elsewhere_go_to_autograd(fsdp, mark):
    fsdp._replace_param_with_raw_if_needed()
    everything = taken(fsdp)
    setattr(fsdp.module.decoder.layers[0].get_parameter(FC1), mark, True)
    assert taken(fsdp) == everything - {FC1}


@pytest.mark.parametrize("whole", [True, False])
def test_unused_parameters_get_zeros_in_graphs_of_layers(fsdp, whole):
    everything = {name for name, _ in fsdp.module.decoder.layers[0].named_parameters()}
    assert taken(fsdp, whole=whole, unused={FC1}) == (everything if whole else everything - {FC1})
