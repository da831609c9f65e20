"""Megatron-FSDP registers the hooks that megatron-core's own does: on the same modules, in order, with its flags."""

import copy
import weakref
from functools import partial
from typing import Any

import pytest
import torch

from .fsdp_variants import (
    FINE_BOTH,
    FINE_FORWARD,
    LAYERS_ARE_UNITS,
    SHARED,
    STRATEGIES,
    Variant,
    delay_weight_gradients,
    freeze_embedding,
    hook_layers,
    small,
)
from .hook_listing import HOOK_DICTS, describe, hooks_of, translated

OTHER_DICTS = ("_state_dict_pre_hooks", "_load_state_dict_post_hooks")

VARIANTS = {
    **{strategy: Variant(small(data_parallel_sharding_strategy=strategy)) for strategy in STRATEGIES},
    **{
        f"{strategy}, fine forward": Variant(small(data_parallel_sharding_strategy=strategy), fsdp=FINE_FORWARD)
        for strategy in STRATEGIES
    },
    "fine forward and backward": Variant(fsdp=FINE_BOTH),
    "bf16": Variant(small(dtype="bf16")),
    "experts": Variant(small(experts=4, moe_shared_expert_intermediate_size=32)),
    "kept transposes": Variant(sharding={"keep_fp8_transpose_cache": True}),
    "frozen parameters": Variant(change=freeze_embedding),
    "shared parameters": Variant(**SHARED),
    "hooks of the user": Variant(change=hook_layers),
    "delayed weight gradients": Variant(change=delay_weight_gradients),
}


def build(name: str, **how):
    """A ``MegatronFSDP`` of the variant."""
    return VARIANTS[name].build(**how).module


@pytest.fixture(params=VARIANTS, scope="module")
def pair(request, ranks):
    """megatron-core's own wrapper and ours, around equal models."""
    return build(request.param, upstream=True), build(request.param)


def test_hooks_are_those_of_megatron_core(pair):
    theirs, ours = (hooks_of(fsdp) for fsdp in pair)
    assert ours == translated(theirs)
    assert any(theirs.values())


@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_units_with_unsharded_parameters_have_the_hooks_of_others(fsdp, strategy):
    unsharded = Variant(small(data_parallel_sharding_strategy=strategy), fsdp=LAYERS_ARE_UNITS).build().module
    ours, others = (hooks_of(each.module.decoder.layers[0]) for each in (unsharded, fsdp))
    assert ours == others


def test_parameters_have_the_same_gradient_hooks(pair):
    counts = [
        {name: len(param._post_accumulate_grad_hooks or ()) for name, param in fsdp.raw_param.items()} for fsdp in pair
    ]
    assert counts[0] == counts[1]
    assert {*counts[0].values()} >= {1}


# ------------------------------------------------------------------------------------------- the sentinels' contract


@pytest.fixture(scope="module")
def fsdp(ranks):
    return build("optim_grads_params")


@pytest.fixture
def running(fsdp):
    """The wrapper as it is during a step: its modules hold raw parameters."""
    fsdp.start_param_sync()
    yield fsdp
    fsdp.finish_grad_sync()


def marked(module: torch.nn.Module, kind: str, sentinel: str) -> list:
    """The handlers that the hooks of one kind name."""
    return [getattr(hook, sentinel) for hook in vars(module)[kind].values() if hasattr(hook, sentinel)]


def test_a_unit_names_what_runs_after_its_backward(fsdp):
    hooks = fsdp.fsdp_hooks
    for layer in fsdp.module.decoder.layers:
        handlers = marked(layer, "_forward_pre_hooks", "_cuda_graph_backward_handler")
        assert handlers == [hooks.release_after_backward]


def test_a_unit_names_what_runs_before_its_backward(fsdp):
    hooks = fsdp.fsdp_hooks
    for layer in fsdp.module.decoder.layers:
        handlers = marked(layer, "_forward_hooks", "_cuda_graph_backward_pre_handler")
        assert handlers == [hooks.unshard_for_backward]


def test_the_root_names_what_opens_backward(fsdp):
    assert marked(fsdp.module, "_forward_hooks", "_cuda_graph_backward_pre_handler") == [fsdp.fsdp_hooks.start_backward]


def test_every_hook_that_attaches_to_autograd_has_a_sentinel(fsdp):
    for module in fsdp.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            attaches = describe(hook).startswith("attach")
            assert attaches == any(
                hasattr(hook, name) for name in ("_cuda_graph_backward_handler", "_cuda_graph_backward_pre_handler")
            )


@pytest.mark.parametrize("name", ["optim_grads_params", "fine forward and backward", "optim_grads"])
def test_every_hook_stays_out_of_graphs(ranks, name):
    from megatron.core.transformer._cuda_graphs.hooks import ModuleHooks

    for module in build(name).modules():
        withheld = ModuleHooks.extract(module, outside_only=True)
        left = [hook for kind in HOOK_DICTS for hook in vars(module)[kind].values()]
        withheld.restore()
        assert left == []


def test_every_hook_is_a_method_of_one_object(fsdp):
    owner = fsdp.fsdp_hooks
    for module in fsdp.modules():
        for kind in (*HOOK_DICTS, *OTHER_DICTS):
            for hook in vars(module)[kind].values():
                method: Any = getattr(hook, "hook", hook)  # torch wraps state-dict hooks
                method = method.func if isinstance(method, partial) else method
                assert method.__self__ is owner
                assert getattr(type(owner), method.__name__)


@pytest.mark.parametrize(
    "names",
    [
        ("unshard_for_forward", "release_after_forward"),
        ("unshard_for_backward", "release_after_backward"),
        ("unshard_for_forward", "release_transpose_cache", "release_after_forward"),
    ],
)
def test_a_hook_can_be_called_with_its_module_alone(running, names):
    layer = running.module.decoder.layers[0]
    for name in names:
        assert getattr(running.fsdp_hooks, name)(layer) is None


def test_only_units_are_released(fsdp):
    with pytest.raises(TypeError, match="GPTModel is not an FSDP unit"):
        fsdp.fsdp_hooks.release_after_forward(fsdp.module)


def test_schedules_that_drive_layers_in_parts_find_the_hooks_by_megatron_cores_names(running):
    hooks = running.fsdp_hooks
    assert running.post_forward_release_module == hooks.release_after_forward
    assert running.post_backward_release_module == hooks.release_after_backward
    running.pre_backward()
    assert hooks.backward.is_open
    running.post_backward()
    assert not hooks.backward.is_open


def test_a_copy_of_a_hooked_module_is_freed(fsdp):
    hooked = torch.nn.Identity()
    hooked._training_state = fsdp.module._training_state
    hooked.register_forward_pre_hook(fsdp.fsdp_hooks.unshard_for_forward, with_kwargs=True)
    copied = copy.deepcopy(hooked)
    copied(torch.ones(1))
    alive = weakref.ref(copied)
    del copied
    assert alive() is None
