"""hooks: hooks leave a module for capture, reach the engine, and come back as they were."""

import inspect
from functools import partial

import pytest
import torch

from megatron.core.transformer._cuda_graphs.errors import UnsupportedError
from megatron.core.transformer._cuda_graphs.hooks import (
    BACKWARD_HANDLER,
    BACKWARD_PRE_HANDLER,
    HOOK_KINDS,
    ModuleHooks,
    extracted_hooks,
    runs_outside_graphs,
)

HOOK_DICTS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
FLAG_DICTS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
ALL_DICTS = HOOK_DICTS + FLAG_DICTS


def hook(name="hook"):
    """A hook that does nothing; each is another object."""

    def call(*offered):
        return None

    call.__name__ = name
    return call


def module_with_every_kind():
    """A module with two hooks of every kind, with and without flags."""
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
    """Every hook and flag dict of ``module``, with its order."""
    return {name: list(getattr(module, name).items()) for name in ALL_DICTS}


def marked(name="hook"):
    return runs_outside_graphs(hook(name))


def handed_over(module):
    """What the engine gets for ``module``, each kind as a list of the hooks behind it."""
    with extracted_hooks([module]) as (hooks,):
        return {kind: [inspect.unwrap(call) for call in hooks[kind].values()] for kind in HOOK_KINDS}


def with_sentinel(sentinel, handler):
    wrapper = hook("wrapper")
    setattr(wrapper, sentinel, handler)
    return wrapper


# ---------------------------------------------------------------------------------------------------- phase 1


def test_every_hook_and_flag_is_copied_in_order_and_removed():
    module = module_with_every_kind()
    before = contents(module)
    assert all(before.values())
    saved = ModuleHooks.extract(module).saved
    assert {name: list(entries.items()) for name, entries in saved.items()} == before
    assert contents(module) == {name: [] for name in ALL_DICTS}


# ---------------------------------------------------------------------------------------------------- phase 2


def test_third_party_hooks_do_not_run_at_capture():
    assert handed_over(module_with_every_kind()) == {kind: [] for kind in HOOK_KINDS}


def test_marked_hooks_are_handed_over_under_their_own_kind():
    module = torch.nn.Linear(2, 2)
    before, after = marked("before"), marked("after")
    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    assert handed_over(module) == {kind: [] for kind in HOOK_KINDS} | {
        "forward_pre_hooks": [before],
        "forward_hooks": [after],
    }


def test_the_keys_are_the_ids_of_the_hooks():
    module = torch.nn.Linear(2, 2)
    handles = [module.register_forward_hook(marked()) for _ in range(2)]
    with extracted_hooks([module]) as (hooks,):
        assert list(hooks["forward_hooks"]) == [handle.id for handle in handles]


def test_hooks_are_handed_over_in_the_order_in_which_torch_runs_them():
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
def test_the_handler_of_a_wrapper_is_handed_over(sentinel, register, kind_of_plain, kind_of_handler):
    module = torch.nn.Linear(2, 2)
    handler, plain = hook("handler"), marked("plain")
    register(module, with_sentinel(sentinel, handler))
    register(module, plain)
    expected = {kind: [] for kind in HOOK_KINDS} | {kind_of_plain: [plain], kind_of_handler: [handler]}
    assert handed_over(module) == expected


def test_the_sentinels_have_the_names_of_the_protocol():
    assert BACKWARD_HANDLER == "_cuda_graph_backward_handler"
    assert BACKWARD_PRE_HANDLER == "_cuda_graph_backward_pre_handler"


def test_a_deprecated_backward_hook_is_refused():
    module = torch.nn.Linear(2, 2)
    module.register_backward_hook(hook())
    before = contents(module)
    with pytest.raises(UnsupportedError, match="non-full backward hook"), extracted_hooks([module]):
        pass
    assert contents(module) == before


# ------------------------------------------------------------------------------------------------- signatures


def called_with(register, *offered):
    """What a hook that ``register`` puts on a module is called with when the engine offers ``offered``."""
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
def test_hooks_get_what_torch_would_give_them(register, offered, expected):
    assert called_with(register, *offered) == expected


@pytest.mark.parametrize(
    ("register", "expected"),
    [
        (torch.nn.Module.register_forward_pre_hook, ((),)),
        (partial(torch.nn.Module.register_forward_pre_hook, with_kwargs=True), ((), {})),
        (torch.nn.Module.register_forward_hook, ((), None)),
        (partial(torch.nn.Module.register_forward_hook, with_kwargs=True), ((), {}, None)),
    ],
    ids=["forward_pre", "forward_pre with kwargs", "forward", "forward with kwargs"],
)
def test_an_engine_that_offers_only_the_module_is_enough(register, expected):
    assert called_with(register) == expected


def test_a_handler_gets_the_module_alone():
    def register(module, handler):
        module.register_forward_pre_hook(with_sentinel(BACKWARD_HANDLER, handler))

    assert called_with(register, ARGS) == ()


def test_what_a_hook_returns_reaches_the_engine():
    module = torch.nn.Linear(2, 2)
    module.register_forward_pre_hook(runs_outside_graphs(lambda module, args: "changed"))
    module.register_forward_hook(runs_outside_graphs(lambda module, args, output: "changed"))
    with extracted_hooks([module]) as (hooks,):
        returned = [call(module) for kind in HOOK_KINDS for call in hooks[kind].values()]
    assert returned == ["changed"] * 2


# ---------------------------------------------------------------------------------------------------- restore


def test_everything_is_restored_in_order_in_the_same_dicts():
    module = module_with_every_kind()
    module.register_forward_pre_hook(with_sentinel(BACKWARD_HANDLER, hook()))
    module.register_forward_hook(with_sentinel(BACKWARD_PRE_HANDLER, hook()))
    handle = module.register_forward_pre_hook(hook("removed"), with_kwargs=True)
    before, dicts = contents(module), [id(getattr(module, name)) for name in ALL_DICTS]
    with extracted_hooks([module]) as (hooks,):
        assert not any(getattr(module, name) for name in ALL_DICTS)
        for kind in HOOK_KINDS:  # an engine may change its dicts
            hooks[kind].clear()
    assert contents(module) == before
    assert [id(getattr(module, name)) for name in ALL_DICTS] == dicts
    handle.remove()
    assert handle.id not in module._forward_pre_hooks


def test_everything_is_back_after_an_exception():
    modules = [module_with_every_kind(), torch.nn.Sequential(module_with_every_kind())]
    modules[1][0].register_forward_hook(runs_outside_graphs(hook()))
    everything = [modules[0], modules[1], modules[1][0]]
    before = [contents(module) for module in everything]
    with pytest.raises(KeyError, match="capture failed"), extracted_hooks(modules):
        raise KeyError("capture failed")
    assert [contents(module) for module in everything] == before


def test_everything_is_back_when_a_later_module_cannot_be_extracted():
    module = module_with_every_kind()
    before = contents(module)
    with pytest.raises(AttributeError), extracted_hooks([module, "no module"]):
        pass
    assert contents(module) == before


def test_a_hook_registered_meanwhile_stays_behind_the_restored_ones():
    module = torch.nn.Linear(2, 2)
    old, new = hook("old"), hook("new")
    module.register_forward_hook(old)
    with extracted_hooks([module]):
        handle = module.register_forward_hook(new, with_kwargs=True)
    assert list(module._forward_hooks.values()) == [old, new]
    assert module._forward_hooks_with_kwargs == {handle.id: True}


# --------------------------------------------------------------------------------------------------- children


def hooks_during_capture(child):
    """What is on ``child`` while its parent's hooks are extracted."""
    with extracted_hooks([torch.nn.Sequential(torch.nn.Identity(), torch.nn.Sequential(child))]):
        return contents(child)


def test_an_ordinary_hook_of_a_child_stays_with_its_flags():
    child = module_with_every_kind()
    before = contents(child)
    assert hooks_during_capture(child) == before


class Owner:
    """Has a hook that is a method, as Megatron-FSDP's are."""

    @runs_outside_graphs
    def marked(self, module, *offered):
        return None


def wrapper_function(sentinel):
    return with_sentinel(sentinel, hook("handler"))


def wrapper_partial(sentinel):
    wrapper = partial(hook("wrapper"), hook("handler"))
    setattr(wrapper, sentinel, hook("handler"))
    return wrapper


@pytest.mark.parametrize(
    "outside",
    [
        runs_outside_graphs(hook()),
        Owner().marked,
        partial(Owner().marked, None),
        runs_outside_graphs(partial(hook())),
        wrapper_function(BACKWARD_HANDLER),
        wrapper_function(BACKWARD_PRE_HANDLER),
        wrapper_partial(BACKWARD_HANDLER),
        partial(wrapper_partial(BACKWARD_PRE_HANDLER)),
    ],
    ids=[
        "marked function",
        "marked method",
        "partial of a marked method",
        "marked partial",
        "wrapper of a backward handler",
        "wrapper of a backward pre-handler",
        "partial that wraps a backward handler",
        "partial of a partial that wraps a backward pre-handler",
    ],
)
def test_a_hook_of_a_child_is_withheld_if_it_is_a(outside):
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


def test_hooks_of_children_are_not_handed_over():
    parent = torch.nn.Sequential(torch.nn.Linear(2, 2))
    parent[0].register_forward_hook(runs_outside_graphs(hook()))
    parent[0].register_forward_hook(hook())
    assert handed_over(parent) == {kind: [] for kind in HOOK_KINDS}


def test_a_child_of_two_callables_gets_its_hooks_back():
    child = module_with_every_kind()
    child.register_forward_hook(runs_outside_graphs(hook()), prepend=True)
    before = contents(child)
    with extracted_hooks([torch.nn.Sequential(child), torch.nn.Sequential(child)]):
        assert len(child._forward_hooks) == len(before["_forward_hooks"]) - 1
    assert contents(child) == before


def test_each_callable_gets_its_own_hooks_in_order():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    hooks = [marked("first"), marked("second")]
    first.register_forward_hook(hooks[0])
    second.register_forward_hook(hooks[1])
    with extracted_hooks([first, torch.nn.Identity(), second]) as per_callable:
        assert [[inspect.unwrap(call) for call in hooks["forward_hooks"].values()] for hooks in per_callable] == [
            [hooks[0]],
            [],
            [hooks[1]],
        ]
