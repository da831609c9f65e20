"""Test that hooks are removed for capture, passed to the engine, and restored."""

import inspect
from functools import partial

import pytest
import torch

from megatron.core.transformer._cuda_graphs.errors import UnsupportedError
from megatron.core.transformer._cuda_graphs.hooks import (
    BACKWARD_HANDLER,
    BACKWARD_PRE_HANDLER,
    HOOK_KINDS,
    extracted_hooks,
    runs_outside_graphs,
)

HOOK_DICTS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
FLAG_DICTS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
ALL_DICTS = HOOK_DICTS + FLAG_DICTS


def hook(name="hook"):
    """Return a new hook that does nothing."""

    def call(*offered):
        return None

    call.__name__ = name
    return call


def module_with_every_kind():
    """Return a module with two hooks of every kind. Its forward hooks have different options."""
    module = torch.nn.Linear(2, 2)
    module.register_forward_pre_hook(hook())
    module.register_forward_pre_hook(hook(), with_kwargs=True, prepend=True)
    module.register_forward_hook(hook(), always_call=True)
    module.register_forward_hook(hook(), with_kwargs=True, prepend=True)
    for _ in range(2):
        module.register_full_backward_pre_hook(hook())
        module.register_full_backward_hook(hook())
    return module


def contents(module):
    """Return the contents of all dicts in which ``module`` stores hooks and hook options."""
    return {name: list(getattr(module, name).items()) for name in ALL_DICTS}


def marked(name="hook"):
    return runs_outside_graphs(hook(name))


def handed_over(module):
    """Return the original hooks of ``module`` that the engine receives, by kind."""
    with extracted_hooks([module]) as (hooks,):
        return {kind: [inspect.unwrap(call) for call in hooks[kind].values()] for kind in HOOK_KINDS}


def with_sentinel(sentinel, handler):
    wrapper = hook("wrapper")
    setattr(wrapper, sentinel, handler)
    return wrapper


def test_third_party_hooks_do_not_run_at_capture():
    assert handed_over(module_with_every_kind()) == {kind: [] for kind in HOOK_KINDS}


def test_hooks_keep_torch_order():
    module = torch.nn.Linear(2, 2)
    first, second, third = marked(), marked(), marked()
    module.register_forward_pre_hook(second)
    module.register_forward_pre_hook(third)
    module.register_forward_pre_hook(first, prepend=True)
    assert handed_over(module)["forward_pre_hooks"] == [first, second, third]


@pytest.mark.parametrize(
    ("sentinel", "register", "kind_of_plain", "kind_of_handler"),
    [
        (BACKWARD_HANDLER, torch.nn.Module.register_forward_pre_hook, "forward_pre_hooks", "backward_hooks"),
        (BACKWARD_PRE_HANDLER, torch.nn.Module.register_forward_hook, "forward_hooks", "backward_pre_hooks"),
    ],
)
def test_handler_replaces_its_wrapper(sentinel, register, kind_of_plain, kind_of_handler):
    module = torch.nn.Linear(2, 2)
    handler, plain = hook("handler"), marked("plain")
    register(module, partial(with_sentinel(sentinel, handler)))
    register(module, plain)
    expected = {kind: [] for kind in HOOK_KINDS} | {kind_of_plain: [plain], kind_of_handler: [handler]}
    assert handed_over(module) == expected


def test_deprecated_backward_hook_is_refused():
    module = torch.nn.Linear(2, 2)
    module.register_backward_hook(hook())
    before = contents(module)
    with pytest.raises(UnsupportedError, match="register_backward_hook"), extracted_hooks([module]):
        pass
    assert contents(module) == before


def called_with(register, *offered):
    """Register a hook with ``register`` and call it with a module and ``offered``.

    Return the arguments that it received after the module.
    """
    module = torch.nn.Linear(2, 2)
    seen: list = []
    register(module, runs_outside_graphs(lambda *args: seen.append(args)))
    with extracted_hooks([module]) as (hooks,):
        (call,) = (call for kind in HOOK_KINDS for call in hooks[kind].values())
        call(module, *offered)
    assert seen[0][0] is module
    return seen[0][1:]


ARGS, KWARGS, OUTPUT = (1, 2), {"mask": 3}, [4]


@pytest.mark.parametrize(
    ("register", "offered", "expected"),
    [
        (torch.nn.Module.register_forward_pre_hook, (ARGS, KWARGS), (ARGS,)),
        (partial(torch.nn.Module.register_forward_pre_hook, with_kwargs=True), (ARGS, KWARGS), (ARGS, KWARGS)),
        (torch.nn.Module.register_forward_hook, (ARGS, OUTPUT), (ARGS, OUTPUT)),
        (partial(torch.nn.Module.register_forward_hook, with_kwargs=True), (ARGS, OUTPUT), (ARGS, {}, OUTPUT)),
    ],
    ids=["forward_pre", "forward_pre with kwargs", "forward", "forward with kwargs"],
)
def test_hooks_get_torch_arguments(register, offered, expected):
    assert called_with(register, *offered) == expected


def test_return_values_reach_the_engine():
    module = torch.nn.Linear(2, 2)
    module.register_forward_pre_hook(runs_outside_graphs(lambda module, args: "changed"))
    module.register_forward_hook(runs_outside_graphs(lambda module, args, output: "changed"))
    with extracted_hooks([module]) as (hooks,):
        returned = [call(module, (), None) for kind in HOOK_KINDS for call in hooks[kind].values()]
    assert returned == ["changed"] * 2


def test_restore_refills_the_same_dicts_in_order():
    module = module_with_every_kind()
    module.register_forward_pre_hook(with_sentinel(BACKWARD_HANDLER, hook()))
    module.register_forward_hook(with_sentinel(BACKWARD_PRE_HANDLER, hook()))
    handle = module.register_forward_pre_hook(hook("removed"), with_kwargs=True)
    before, dicts = contents(module), [id(getattr(module, name)) for name in ALL_DICTS]
    with extracted_hooks([module]) as (hooks,):
        assert not any(getattr(module, name) for name in ALL_DICTS)
        for kind in HOOK_KINDS:  # an engine may modify its dicts
            hooks[kind].clear()
    assert contents(module) == before
    assert [id(getattr(module, name)) for name in ALL_DICTS] == dicts
    handle.remove()
    assert handle.id not in module._forward_pre_hooks


def test_hooks_are_restored_after_an_exception():
    modules = [module_with_every_kind(), torch.nn.Sequential(module_with_every_kind())]
    modules[1][0].register_forward_hook(runs_outside_graphs(hook()))
    everything = [modules[0], modules[1], modules[1][0]]
    before = [contents(module) for module in everything]
    with pytest.raises(KeyError, match="capture failed"), extracted_hooks(modules):
        raise KeyError("capture failed")
    assert [contents(module) for module in everything] == before


def test_hook_registered_meanwhile_follows_restored_hooks():
    module = torch.nn.Linear(2, 2)
    old, new = hook("old"), hook("new")
    module.register_forward_hook(old)
    with extracted_hooks([module]):
        handle = module.register_forward_hook(new, with_kwargs=True)
    assert list(module._forward_hooks.values()) == [old, new]
    assert module._forward_hooks_with_kwargs == {handle.id: True}


def hooks_during_capture(child):
    """Return the hooks of ``child`` while its parent's hooks are extracted."""
    with extracted_hooks([torch.nn.Sequential(torch.nn.Identity(), torch.nn.Sequential(child))]):
        return contents(child)


class Owner:
    """An object with a method to register as a hook."""

    @runs_outside_graphs
    def marked(self, module, *offered):
        return None


@pytest.mark.parametrize(
    "outside",
    [
        runs_outside_graphs(hook()),
        partial(Owner().marked, None),
        with_sentinel(BACKWARD_HANDLER, hook()),
        partial(with_sentinel(BACKWARD_PRE_HANDLER, hook())),
    ],
    ids=["marked function", "partial of a marked method", "wrapper of a backward handler", "partial of a wrapper"],
)
def test_child_hook_outside_graphs_is_removed(outside):
    child = torch.nn.Linear(2, 2)
    stays = hook("stays")
    child.register_forward_pre_hook(outside, with_kwargs=True)
    child.register_forward_hook(outside, with_kwargs=True, always_call=True)
    child.register_forward_hook(stays)
    before = contents(child)
    during = hooks_during_capture(child)
    assert {name: [value for _, value in entries] for name, entries in during.items()} == {
        name: [stays] if name == "_forward_hooks" else [] for name in ALL_DICTS
    }
    assert contents(child) == before
