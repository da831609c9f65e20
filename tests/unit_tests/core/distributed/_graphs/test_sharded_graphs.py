"""Captures of layers under Megatron-FSDP, and their replays: gradients withheld, nothing left over, moved buffers."""

import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs import pipelines, runners
from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.runners import Captured, Eager, Planned
from megatron.core.transformer._cuda_graphs.engine.addresses import MovedBufferError
from megatron.core.transformer._cuda_graphs.hooks import BACKWARD_PRE_HANDLER

from ..fsdp_variants import Variant, run_backward, small

CASE = small(layers=4)
DOUBLE_BUFFERED = Variant(CASE)
FLAGS = ("--fsdp-double-buffer", "--fsdp-db-use-persist-buf-on-alloc-fail")


@pytest.fixture
def fsdp(ranks):
    return DOUBLE_BUFFERED.build(graphs=True).module


@pytest.fixture
def layers(fsdp):
    return list(fsdp.module.decoder.layers)


def in_use(fsdp) -> dict:
    """The buffers of the two pools that are taken."""
    groups = fsdp.param_and_grad_buffer.parameter_groups
    unit = next(group for group in groups if group.fsdp_unit_id is not None)
    return {
        "parameters": dict(unit.model_weight_buffer.temporary_bucket_allocator.using_buffer),
        "gradients": dict(unit.main_grad_buffer.temporary_bucket_allocator.using_buffer),
    }


NOTHING: dict[str, dict] = {"parameters": {}, "gradients": {}}


def forward_of(hooks, layer):
    """What runs around a captured forward."""
    hooks.unshard_for_forward(layer)
    hooks.release_after_forward(layer)


def backward_of(hooks, layer, *, fused=()):
    """What runs around a captured backward, in which fused kernels write the main gradients of ``fused``.

    Returns where these are.
    """
    hooks.unshard_for_backward(layer)
    for param in fused:
        param.main_grad = param.get_main_grad()
        param.grad_added_to_main_grad = True
    places = [param.main_grad.data_ptr() for param in fused]
    hooks.release_after_backward(layer)
    return places


def capture(fsdp, layers, *, fused=()):
    """Run the hooks of one capture of all layers; returns where the main gradients of ``fused`` were, by layer."""
    hooks, places = fsdp.fsdp_hooks, {}
    with fsdp.graphs.capture_graphs(layers):
        for layer in layers:
            forward_of(hooks, layer)
        for layer in reversed(layers):
            params = [layer.get_parameter(name) for name in fused]
            places[layer] = backward_of(hooks, layer, fused=params)
    return places


@contextmanager
def replaying(fsdp, layers, direction="backward"):
    """The step after capture, in its forward or its backward pass: layers replay, modules hold raw parameters."""
    for layer in layers:
        layer.replaying = "training"
    fsdp.start_param_sync()
    if direction == "backward":
        fsdp.pre_backward()
    try:
        yield fsdp.fsdp_hooks
    finally:
        fsdp.fsdp_hooks.backward.close()
        for layer in layers:
            del layer.replaying


def outcome(fsdp, error):
    """Capture, ended by ``error`` if there is one."""
    try:
        with fsdp.graphs.capture_graphs(fsdp.module.decoder.layers):
            for layer in fsdp.module.decoder.layers:
                fsdp.fsdp_hooks.unshard_for_forward(layer)
                fsdp.fsdp_hooks.release_after_forward(layer)
            if error:
                fsdp.fsdp_hooks.unshard_for_backward(fsdp.module.decoder.layers[-1])
                raise error
    except KeyboardInterrupt:
        pass


# ------------------------------------------------------------------------------------------------------- capture mode

ERRORS = pytest.mark.parametrize("error", [None, KeyboardInterrupt()], ids=["success", "exception"])


def test_capture_sees_raw_parameters(fsdp, layers):
    with fsdp.graphs.capture_graphs(layers):
        captured = dict(fsdp.module.named_parameters())
    assert all(captured[name] is fsdp.raw_param[name] for name in captured)


@ERRORS
@pytest.mark.parametrize("distributed", [True, False], ids=["DTensor", "raw"])
def test_parameters_are_what_they_were_after_capture(fsdp, distributed, error):
    if not distributed:
        fsdp._replace_param_with_raw_if_needed()
    before = dict(fsdp.module.named_parameters())
    outcome(fsdp, error)
    after = dict(fsdp.module.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert fsdp.is_param_fsdp_distributed == distributed


@ERRORS
def test_capture_mode_ends(fsdp, error):
    outcome(fsdp, error)
    assert fsdp.fsdp_hooks.registry.captured is None


def test_capture_mode_ends_even_if_buckets_cannot_be_given_back(fsdp, layers):
    registry, distributed = fsdp.fsdp_hooks.registry, fsdp.is_param_fsdp_distributed
    stuck = RuntimeError("a collective does not end")
    give_back = mock.patch.object(pipelines, "release_all", side_effect=[None, stuck, stuck])
    with give_back, pytest.raises(RuntimeError, match="does not end"), fsdp.graphs.capture_graphs(layers):
        pass
    assert (registry.captured, registry.graphed) == (None, {})
    assert fsdp.is_param_fsdp_distributed == distributed


@ERRORS
def test_every_bucket_is_given_back(fsdp, error):
    outcome(fsdp, error)
    assert in_use(fsdp) == NOTHING
    assert not fsdp.all_gather_pipeline.param_gather_event_map


@ERRORS
def test_modules_are_idle_after_capture(fsdp, error):
    outcome(fsdp, error)
    assert {module._training_state.name for module in fsdp.module.modules()} == {"IDLE"}


def test_a_failed_capture_leaves_no_unit_graphed(fsdp, layers):
    outcome(fsdp, KeyboardInterrupt())
    with replaying(fsdp, layers) as hooks:
        assert {type(hooks.registry.of(layer)) for layer in layers} == {Eager}


def test_the_runner_of_a_captured_unit_is_that_of_the_graphs_that_its_call_replays(fsdp, layers):
    capture(fsdp, layers)
    registry = fsdp.fsdp_hooks.registry
    assert type(registry.of(layers[0])) is Eager
    with replaying(fsdp, layers):
        assert type(registry.of(layers[0])) is Planned
        with fsdp.graphs.capture_graphs(layers[1:]):
            assert [type(registry.of(layer)) for layer in layers[:2]] == [Eager, Captured]
        fsdp.graphs.forget_graphs(layers)
        assert type(registry.of(layers[1])) is Eager


def test_a_backward_pass_has_the_runner_of_its_forward_pass_whatever_the_module_replays_by_then(fsdp, layers):
    capture(fsdp, layers)
    fsdp._replace_param_with_raw_if_needed()
    hooks, x = fsdp.fsdp_hooks, torch.ones(2, requires_grad=True)
    (attach,) = [hook for hook in layers[3]._forward_hooks.values() if hasattr(hook, BACKWARD_PRE_HANDLER)]
    for expected in (Planned, Eager):
        if expected is Planned:
            layers[3].replaying = "training"
        output = attach(layers[3], (), x * 2)
        if expected is Planned:
            del layers[3].replaying
        else:
            layers[3].replaying = "training"
        fsdp.pre_backward()
        output.sum().backward()
        assert type(hooks.backward.runners[layers[3]]) is expected
        hooks.backward.drop()
    del layers[3].replaying


def test_one_backward_pass_of_a_replay_and_of_an_eager_pass_is_refused(fsdp, layers):
    capture(fsdp, layers)
    with replaying(fsdp, layers) as hooks:
        hooks.unshard_for_backward(layers[3])
        with pytest.raises(RuntimeError, match="graphs replayed and one that ran eagerly"):
            hooks.unshard_for_backward(layers[3], runner=Eager(hooks.context, layers[3]))


def test_nothing_is_in_flight_when_a_graph_records(fsdp, layers):
    with fsdp.graphs.capture_graphs(layers):
        fsdp.fsdp_hooks.unshard_for_forward(layers[0])
        assert len(in_use(fsdp)["parameters"]) == 2  # the next layer was prefetched
        assert not fsdp.all_gather_pipeline.param_gather_event_map


def test_a_graph_makes_fp8_transposes_itself(fsdp, layers):
    """Those that Megatron-FSDP makes before the backward pass are freed after it."""
    hooks, discarded = fsdp.fsdp_hooks, []
    weight = layers[0].mlp.linear_fc1.weight
    hooks.context.units[layers[0]].float8_params.append(weight)
    with mock.patch.object(runners, "fp8_discard_transpose_cache") as drop:
        drop.side_effect = lambda param: discarded.append(param is weight)
        with fsdp.graphs.capture_graphs(layers):
            forward_of(hooks, layers[0])
            discarded.clear()
            hooks.unshard_for_backward(layers[0])
            assert discarded == [True]
            hooks.release_after_backward(layers[0])


def test_a_unit_that_is_prefetched_but_not_captured_is_released(fsdp, layers):
    with fsdp.graphs.capture_graphs(layers[2:]):
        fsdp.fsdp_hooks.unshard_for_backward(layers[2])
        used = in_use(fsdp)["parameters"]
        buffer = fsdp.param_and_grad_buffer
        assert used.keys() == {buffer.param_to_param_group[param] for param in layers[2].parameters()}


def test_both_buckets_of_a_unit_that_is_not_captured_are_released(fsdp, layers):
    """With FP8 parameters a unit has one for forward and one for backward."""
    buffer, gathers = fsdp.param_and_grad_buffer, fsdp.all_gather_pipeline
    with fsdp.graphs.capture_graphs(layers[2:]):
        others = {buffer.param_to_param_group[param] for layer in layers[:2] for param in layer.parameters()}
        with mock.patch.object(gathers, "release_bucket", wraps=gathers.release_bucket) as release:
            fsdp.fsdp_hooks.unshard_for_forward(layers[2])
        released = {call.args for call in release.call_args_list}
    assert released == {(bucket, bwd) for bucket in others for bwd in (False, True)}


def test_gathers_in_flight_are_settled_before_capture(fsdp, layers):
    fsdp.start_param_sync()
    fsdp.all_gather_and_wait_parameters_ready(list(layers[2].parameters()), wait_bucket_ready=False)
    assert in_use(fsdp)["parameters"]
    # megatron-core warns of those left
    with warnings.catch_warnings(action="error", category=UserWarning), fsdp.graphs.capture_graphs(layers):
        assert in_use(fsdp) == NOTHING


def test_gradients_that_autograd_makes_while_capturing_are_withheld(fsdp, layers):
    with fsdp.graphs.capture_graphs(layers):
        param = layers[0].mlp.linear_fc1.weight
        param.grad = torch.ones_like(param)
        fsdp.fsdp_hooks.handle_gradient(param)
        assert param.grad is not None
        assert fsdp.grad_reduce_pipeline.grad_reduce_queue == []
        assert in_use(fsdp)["gradients"] == {}
        param.grad = None


def test_the_backward_of_a_captured_layer_opens_no_backward_pass(fsdp, layers):
    with fsdp.graphs.capture_graphs(layers):
        fsdp.fsdp_hooks.start_backward(layers[0])
        assert not fsdp.fsdp_hooks.backward.is_open


@ERRORS
def test_no_gradient_is_left_of_a_capture(fsdp, layers, error):
    params = list(fsdp.raw_param.values())
    with pytest.raises(KeyboardInterrupt) if error else nullcontext(), fsdp.graphs.capture_graphs(layers):
        for param in params:
            param.grad = torch.zeros_like(param)
        if error:
            raise error
    assert [param.grad for param in params] == [None] * len(params)


@ERRORS
def test_no_parameter_counts_as_accumulated_after_capture(fsdp, layers, error):
    params = list(fsdp.raw_param.values())
    with pytest.raises(KeyboardInterrupt) if error else nullcontext(), fsdp.graphs.capture_graphs(layers):
        for param in params:
            param.grad_added_to_main_grad = True
        if error:
            raise error
    assert not any(param.grad_added_to_main_grad for param in params)


def test_reductions_in_flight_end_before_capture(fsdp, layers):
    queue, events = fsdp.grad_reduce_pipeline.grad_reduce_queue, []
    reduction = SimpleNamespace(wait=lambda: events.append("waited for"))
    queue.append((reduction, lambda: events.append("freed"), 0))
    with fsdp.graphs.capture_graphs(layers):
        assert events == ["waited for", "freed"]
        assert queue == []


# --------------------------------------------------------------------------------------------------- moved parameters


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_units_are_gathered_where_their_graphs_read(fsdp, layers, direction):
    capture(fsdp, layers)
    with replaying(fsdp, layers, direction) as hooks:
        for layer in layers if direction == "forward" else reversed(layers):
            getattr(hooks, f"unshard_for_{direction}")(layer)
            getattr(hooks, f"release_after_{direction}")(layer)


def test_units_take_turns_with_the_two_buffers(fsdp, layers):
    capture(fsdp, layers)
    with replaying(fsdp, layers, "forward") as hooks:
        places = []
        for layer in layers:
            hooks.unshard_for_forward(layer)
            places.append(layer.mlp.linear_fc1.weight.data_ptr())
            hooks.release_after_forward(layer)
    assert len(set(places)) == 2
    assert places[:2] == places[2:]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_moved_parameter_is_an_error_that_names_it_and_the_flags(fsdp, layers, direction):
    capture(fsdp, layers)
    with replaying(fsdp, layers, direction) as hooks:
        gathers, moved = fsdp.all_gather_pipeline, layers[1].mlp.linear_fc1.weight
        wait = gathers.wait_bucket_ready

        def gathered_elsewhere(*args, **kwargs):
            wait(*args, **kwargs)
            moved.data = moved.data.clone()

        name = rf"decoder\.layers\.1\.mlp\.linear_fc1\.weight \(in {direction}\)"
        elsewhere = mock.patch.object(gathers, "wait_bucket_ready", gathered_elsewhere)
        with elsewhere, pytest.raises(MovedBufferError, match=name) as error:
            getattr(hooks, f"unshard_for_{direction}")(layers[1])
    assert all(flag in str(error.value) for flag in FLAGS)


def test_a_unit_that_runs_out_of_turn_is_noticed(fsdp, layers):
    capture(fsdp, layers)
    with replaying(fsdp, layers, "forward") as hooks:
        # The second unit holds the buffer that the fourth had at capture.
        fsdp.all_gather_and_wait_parameters_ready(list(layers[1].parameters()), prefetch=False)
        with pytest.raises(MovedBufferError, match=r"use decoder\.layers\.3\..* \(in forward\) .* out of turn"):
            hooks.unshard_for_forward(layers[3])


def test_an_eager_run_in_between_does_not_move_parameters(fsdp, layers):
    capture(fsdp, layers)
    fsdp.eval()
    with torch.no_grad():
        for layer in (*layers, layers[0], layers[3]):
            fsdp.start_param_sync()
            fsdp.fsdp_hooks.unshard_for_forward(layer)
            fsdp.fsdp_hooks.release_after_forward(layer)
    fsdp.finish_grad_sync()
    fsdp.train()
    with replaying(fsdp, layers, "forward") as hooks:
        for layer in layers:
            forward_of(hooks, layer)


# ---------------------------------------------------------------------------------------------------- fused gradients

FUSED = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")


def test_fused_gradients_take_turns_with_the_two_buffers_while_capturing(fsdp, layers):
    places = list(capture(fsdp, layers, fused=FUSED).values())
    assert len({tuple(place) for place in places}) == 2
    assert places[:2] == places[2:]
    assert in_use(fsdp) == NOTHING


def test_no_main_gradient_points_to_a_released_buffer_after_capture(fsdp, layers):
    capture(fsdp, layers, fused=FUSED)
    claimed = [param for name, param in fsdp.raw_param.items() if name.endswith(FUSED)]
    assert [param.main_grad for param in claimed] == [None] * len(layers) * len(FUSED)


def test_fused_gradients_are_claimed_where_the_graph_writes_before_backward(fsdp, layers):
    places = capture(fsdp, layers, fused=FUSED)
    with replaying(fsdp, layers) as hooks:
        hooks.unshard_for_backward(layers[3])
        assert [layers[3].get_parameter(name).main_grad.data_ptr() for name in FUSED] == places[layers[3]]


def test_fused_gradients_of_every_later_backward_are_claimed(fsdp, layers):
    capture(fsdp, layers, fused=FUSED)
    with replaying(fsdp, layers) as hooks:
        fused = [layers[3].get_parameter(name) for name in FUSED]
        for _ in range(2):
            hooks.unshard_for_backward(layers[3])
            assert list(map(id, hooks.registry.of(layers[3]).facts.fused)) == list(map(id, fused))
            hooks.release_after_backward(layers[3])


def test_the_backward_of_a_unit_that_is_not_captured_notes_nothing_while_capturing(fsdp, layers):
    with fsdp.graphs.capture_graphs(layers[2:]):
        backward_of(fsdp.fsdp_hooks, layers[0])
        assert fsdp.fsdp_hooks.backward.collected == {}
    assert layers[0] not in fsdp.fsdp_hooks.registry.graphed


def test_gradients_that_no_graph_writes_are_not_claimed(fsdp, layers):
    capture(fsdp, layers, fused=FUSED)
    with replaying(fsdp, layers) as hooks:
        hooks.unshard_for_backward(layers[3])
        assert getattr(layers[3].mlp.linear_fc1.bias, "main_grad", None) is None


def test_a_moved_main_gradient_is_an_error_that_names_it_and_the_flags(fsdp, layers):
    capture(fsdp, layers, fused=FUSED)
    with replaying(fsdp, layers) as hooks:
        moved = layers[3].mlp.linear_fc2.weight
        elsewhere = mock.patch.object(moved, "get_main_grad", return_value=torch.zeros_like(moved))
        name = r"main gradient of decoder\.layers\.3\.mlp\.linear_fc2\.weight"
        with elsewhere, pytest.raises(MovedBufferError, match=name) as e:
            hooks.unshard_for_backward(layers[3])
    assert all(flag in str(e.value) for flag in FLAGS)


def test_a_gradient_that_a_graph_wrote_is_kept_when_autograd_reports_it(fsdp, layers):
    capture(fsdp, layers, fused=FUSED)
    with replaying(fsdp, layers) as hooks:
        hooks.unshard_for_backward(layers[3])
        fused, plain = layers[3].mlp.linear_fc1.weight, layers[3].mlp.linear_fc1.bias
        fused.main_grad.fill_(3.0)  # the graph
        for param in (fused, plain):
            param.grad = torch.full_like(param, 5.0)  # of a fused parameter, a placeholder
            hooks.handle_gradient(param)
        hooks.release_after_backward(layers[3])
        assert fused.main_grad.unique().tolist() == [3.0]
        assert plain.main_grad.unique().tolist() == [5.0]
        assert fused.grad is None


def test_gradients_of_a_graph_are_handled_together_at_the_end_of_its_units_backward(fsdp, layers):
    capture(fsdp, layers)
    with replaying(fsdp, layers) as hooks:
        hooks.unshard_for_backward(layers[3])
        params = list(layers[3].parameters())
        handled = []
        with mock.patch.object(
            fsdp.grad_reduce_pipeline, "reduce_gradients", lambda params, **_: handled.append(params)
        ):
            for param in params:
                param.grad = torch.full_like(param, 5.0)
                hooks.handle_gradient(param)
            assert handled == []
            hooks.release_after_backward(layers[3])
        assert [list(map(id, some)) for some in handled] == [list(map(id, params))]
        assert all(param.main_grad.unique().tolist() == [5.0] for param in params)


def test_gradients_that_wait_for_a_unit_without_end_are_handled_at_the_end_of_backward(fsdp, layers):
    capture(fsdp, layers)
    with replaying(fsdp, layers) as hooks:
        hooks.unshard_for_backward(layers[3])
        params = list(layers[3].parameters())
        hooks.gradients.awaited = set(params)
        for param in params:
            param.grad = torch.full_like(param, 5.0)
            hooks.handle_gradient(param)
        hooks.backward.finish_backward()
        assert all(param.grad is None for param in params)
        with mock.patch.object(fsdp.grad_reduce_pipeline, "reduce_gradients") as reduce:
            hooks.release_after_backward(layers[3])
        assert not reduce.called  # a second time


def test_gradients_are_written_anew_once_graphs_are_forgotten(fsdp, layers):
    capture(fsdp, layers, fused=FUSED)
    fsdp.graphs.forget_graphs(layers)
    with replaying(fsdp, layers) as hooks:
        param = layers[3].mlp.linear_fc1.weight
        param.grad = torch.full_like(param, 5.0)
        hooks.handle_gradient(param)
        assert param.main_grad.unique().tolist() == [5.0]


def test_training_goes_on_after_capture(fsdp, layers):
    run_backward(fsdp, CASE)
    fsdp.finish_grad_sync()
    capture(fsdp, layers, fused=FUSED)
    run_backward(fsdp, CASE)
    fsdp.finish_grad_sync()
    assert in_use(fsdp) == NOTHING


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_a_graphed_layer_gathers_for_its_children_which_do_not_run(ranks, strategy, direction):
    variant = Variant(small(strategy=strategy), fsdp={"enable_fine_grained_param_gather_hook": True})
    fsdp = variant.build(graphs=True).module
    layer = fsdp.module.decoder.layers[0]
    with fsdp.graphs.capture_graphs([layer]):
        pass
    layer.replaying = "training"
    fsdp.start_param_sync()
    gathers, buffer = fsdp.all_gather_pipeline, fsdp.param_and_grad_buffer
    with mock.patch.object(gathers, "wait_bucket_ready", wraps=gathers.wait_bucket_ready) as wait:
        getattr(fsdp.fsdp_hooks, f"unshard_for_{direction}")(layer)
    assert {call.args[0] for call in wait.call_args_list} == {
        buffer.param_to_param_group[param] for param in layer.parameters()
    }
