"""The state that the hooks of Megatron-FSDP leave behind, of modules and of parameter buckets."""

from unittest import mock

import pytest

from .fsdp_variants import Variant, small


@pytest.fixture
def build(ranks):
    return lambda strategy: Variant(small(strategy=strategy)).build().module


def states(module):
    return {each._training_state.name for each in module.modules()}


def test_both_buckets_of_a_unit_are_released_after_its_backward(build):
    """With FP8 parameters it has one for forward and one for backward."""
    fsdp = build("optim_grads_params")
    layer, buffer, gathers = fsdp.module.decoder.layers[0], fsdp.param_and_grad_buffer, fsdp.all_gather_pipeline
    fsdp.start_param_sync()
    buckets = {buffer.param_to_param_group[param] for param in layer.parameters()}
    with mock.patch.object(gathers, "release_bucket") as release:
        fsdp.fsdp_hooks.release_after_backward(layer)
    assert {call.args for call in release.call_args_list} == {(bucket, bwd) for bucket in buckets for bwd in (0, 1)}


def test_a_unit_is_idle_after_its_backward(build):
    fsdp = build("optim_grads_params")
    fsdp.start_param_sync()
    fsdp.pre_backward()
    first, second = fsdp.module.decoder.layers[:2]
    fsdp.fsdp_hooks.release_after_backward(first)
    assert states(first) == {"IDLE"}
    assert states(second) == {"PRE_BACKWARD"}


@pytest.mark.parametrize(
    ("strategy", "expected"), [("optim_grads_params", {"PRE_BACKWARD"}), ("optim_grads", {"IDLE"})]
)
def test_forward_hooks_know_of_the_backward_pass_where_parameters_are_sharded(build, strategy, expected):
    fsdp = build(strategy)
    fsdp.start_param_sync()
    fsdp.pre_backward()
    assert states(fsdp.module) == expected
    fsdp.fsdp_hooks.backward.close()


@pytest.mark.parametrize("reduced", [True, False])
def test_the_end_of_a_backward_pass_ends_the_reductions_that_it_began(build, reduced):
    fsdp = build("optim")
    fsdp.start_param_sync()
    fsdp.pre_backward()
    assert fsdp.graphs.gradients.awaited
    with (
        mock.patch.object(fsdp.graphs.gradients, "_accumulate_and_reduce", return_value=reduced),
        mock.patch.object(fsdp.grad_reduce_pipeline, "reset") as end,
    ):
        fsdp.fsdp_hooks.backward.finish_backward()
    assert end.called is reduced
    assert not fsdp.graphs.gradients.awaited


def test_after_a_backward_pass_that_was_forgotten_all_gradients_are_expected_again(build):
    fsdp = build("optim")
    fsdp.start_param_sync()
    fsdp.pre_backward()
    expected = set(fsdp.graphs.gradients.awaited)
    fsdp.fsdp_hooks.backward.drop()
    assert not fsdp.graphs.gradients.awaited
    fsdp.pre_backward()
    assert expected and fsdp.graphs.gradients.awaited == expected
    fsdp.fsdp_hooks.backward.drop()
