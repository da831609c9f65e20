"""capture_time_hooks: capture-time hooks run around every warm-up and capture pass, outside the graph."""

import re
from functools import partial

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from megatron.core.transformer._cuda_graphs.hooks import HOOK_KINDS

from .captured_cases import device_tensor, structure

pytestmark = pytest.mark.usefixtures("cpu_backend")


class Events:
    """What happened, in order, each with whether a graph was recording."""

    def __init__(self):
        self.seen: list[str] = []

    def __call__(self, event, *unused):
        self.seen.append(event + (" recorded" if torch.cuda.is_current_stream_capturing() else ""))

    def hooks(self, name):
        return {kind: {7: lambda module, kind=kind: self(f"{name} {kind}")} for kind in HOOK_KINDS}

    def module(self, name):
        return Traced(name, self)


class TracedIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, event):
        ctx.event = event
        event("forward")
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.event("backward")
        return grad * 1, None


class Traced(torch.nn.Module):
    """Tells when its forward and backward run."""

    def __init__(self, name, events):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3).cuda()
        self._event = lambda event: events(f"{name} {event}")

    def forward(self, x):
        return TracedIdentity.apply(self.linear(x), self._event)


def forward_of(name, recorded=""):
    return [f"{name} forward_pre_hooks", f"{name} forward{recorded}", f"{name} forward_hooks"]


def backward_of(name, recorded=""):
    return [f"{name} backward_pre_hooks", f"{name} backward{recorded}", f"{name} backward_hooks"]


def inputs(count):
    return tuple((device_tensor(2, 3, seed=i),) for i in range(count))


# ----------------------------------------------------------------------------------------------------------- order


def test_hooks_run_around_each_pass_in_warm_up_and_capture():
    events = Events()
    make_graphed_callables(
        (events.module("a"), events.module("b")),
        inputs(2),
        num_warmup_iters=2,
        pre_warmup_hook=lambda: events("before warm-up"),
        post_warmup_hook=lambda: events("after warm-up"),
        capture_time_hooks=[events.hooks("a"), events.hooks("b")],
    )

    def iteration(recorded=""):
        return [
            *forward_of("a", recorded),
            *forward_of("b", recorded),
            *backward_of("b", recorded),
            *backward_of("a", recorded),
        ]

    assert events.seen == [
        "before warm-up",
        *iteration(),
        *iteration(),
        "after warm-up",
        *iteration(" recorded"),
    ]


def test_hooks_follow_the_order_of_passes_in_warm_up_and_capture():
    events = Events()
    make_graphed_callables(
        (events.module("a"), events.module("b"), events.module("c")),
        inputs(6),
        num_warmup_iters=2,
        _order=[1, 2, 1, -2, -1, 2, -2, -1],
        _num_layers_per_chunk=[2, 1],
        pre_warmup_hook=lambda: events("before warm-up"),
        post_warmup_hook=lambda: events("after warm-up"),
        capture_time_hooks=[events.hooks(name) for name in "abc"],
    )

    def iteration(recorded=""):
        forward, backward = partial(forward_of, recorded=recorded), partial(backward_of, recorded=recorded)
        return [
            *(forward("a") + forward("b")),
            *forward("c"),
            *(forward("a") + forward("b")),
            *backward("c"),
            *(backward("b") + backward("a")),
            *forward("c"),
            *backward("c"),
            *(backward("b") + backward("a")),
        ]

    assert events.seen == [
        "before warm-up",
        *iteration(),
        *iteration(),
        "after warm-up",
        *iteration(" recorded"),
    ]


def test_hooks_are_not_replayed():
    events = Events()
    graphed = make_graphed_callables(events.module("a"), inputs(1)[0], capture_time_hooks=[events.hooks("a")])
    events.seen.clear()
    graphed(device_tensor(2, 3)).sum().backward()
    assert events.seen == []


def test_backward_hooks_run_though_nothing_requires_grad():
    events = Events()
    hooks = events.hooks("a")
    make_graphed_callables(
        lambda x: x * 2, (device_tensor(3, grad=False),), num_warmup_iters=1, capture_time_hooks=[hooks]
    )
    assert events.seen == [f"a {kind}" for kind in HOOK_KINDS] * 2


def test_only_forward_hooks_run_for_modules_in_evaluation_mode():
    events = Events()
    module = events.module("a").eval()
    make_graphed_callables(module, inputs(1)[0], num_warmup_iters=1, capture_time_hooks=[events.hooks("a")])
    assert events.seen == [*forward_of("a"), *forward_of("a", " recorded")]


# ------------------------------------------------------------------------------------------------ what they are given


def nested(x, *, scale):
    y = x * scale
    return {"alone": y, "pair": (y * 2, [y * 3]), "nothing": None}


def calls_of(kind):
    """What the hooks of ``kind`` were called with in two warm-up iterations and the capture of ``nested``."""
    calls: list[tuple] = []
    args, kwargs = (device_tensor(4),), {"scale": device_tensor(4, grad=False)}
    make_graphed_callables(
        nested,
        args,
        num_warmup_iters=2,
        sample_kwargs=kwargs,
        capture_time_hooks=[{kind: {0: lambda *offered: calls.append(offered)}}],
    )
    assert [offered[0] for offered in calls] == [nested] * 3
    return [offered[1:] for offered in calls], args, kwargs


def test_forward_hooks_get_the_raw_output_in_warm_up_and_capture_alike():
    calls, args, _ = calls_of("forward_hooks")
    for given, output in calls:
        assert given[0] is args[0]
        assert structure(output) == {"alone": (4,), "pair": ((4,), [(4,)]), "nothing": None}
        assert output["pair"][1][0].grad_fn is not None


def test_forward_pre_hooks_get_args_and_kwargs_in_warm_up_and_capture_alike():
    calls, args, kwargs = calls_of("forward_pre_hooks")
    for given, given_kwargs in calls:
        assert given[0] is args[0]
        assert list(given_kwargs) == ["scale"]
        assert given_kwargs["scale"] is kwargs["scale"]


@pytest.mark.parametrize("kind", HOOK_KINDS)
def test_a_hook_that_takes_one_argument_gets_the_module(kind):
    module, seen = torch.nn.Linear(3, 3).cuda(), []

    def hook(module):
        seen.append(module)

    make_graphed_callables(module, inputs(1)[0], num_warmup_iters=1, capture_time_hooks=[{kind: {0: hook}}])
    assert seen == [module, module]


def calls_with(kind, hook_of):
    """What the hook that ``hook_of`` makes of a list has put there in one pass of warm-up and the capture."""
    seen: list = []
    module = torch.nn.Linear(3, 3).cuda()
    hooks = [{kind: {0: hook_of(seen)}}]
    make_graphed_callables(module, inputs(1)[0], num_warmup_iters=1, capture_time_hooks=hooks)
    return seen


@pytest.mark.parametrize("kind", HOOK_KINDS)
def test_parameters_of_a_hooks_own_keep_their_defaults(kind):
    def hook_of(seen):
        def hook(module, idx=3, kind="own"):
            seen.append((idx, kind))

        return hook

    assert calls_with(kind, hook_of) == [(3, "own")] * 2


def test_what_a_hook_does_to_parameters_is_what_the_graph_reads():
    """As Megatron-FSDP's: the buffer is filled before forward and given back after backward."""
    module = torch.nn.Linear(3, 3, bias=False).cuda()
    gathered = torch.ones(3, 3, device="cuda")
    released = module.weight.data.clone()

    def gather(module):
        module.weight.data = gathered

    def release(module):
        module.weight.data = released

    hooks = {"forward_pre_hooks": {0: gather}, "backward_hooks": {0: release}}
    graphed = make_graphed_callables(module, inputs(1)[0], capture_time_hooks=[hooks])
    assert module.weight.data_ptr() == released.data_ptr()
    x = device_tensor(2, 3, seed=8)
    gathered.fill_(2.0)
    assert torch.equal(graphed(x), torch.nn.functional.linear(x, gathered))


# ---------------------------------------------------------------------------------------------------------- errors


def capture_two(hooks):
    modules = torch.nn.Linear(3, 3).cuda(), torch.nn.Sequential(torch.nn.Linear(3, 3)).cuda()
    make_graphed_callables(modules, inputs(2), capture_time_hooks=hooks)


@pytest.mark.parametrize("hooks", [[], [None], [None] * 3], ids=len)
def test_another_number_of_entries_than_callables_is_refused(hooks):
    with pytest.raises(
        ValueError, match=f"capture_time_hooks must have one entry for each of 2 callables: {len(hooks)}"
    ):
        capture_two(hooks)


@pytest.mark.parametrize("key", ["forward_pre", "pre_backward", "_forward_hooks", 0])
def test_an_unknown_key_is_refused_by_name_with_the_keys_there_are(key):
    with pytest.raises(ValueError) as error:
        capture_two([None, {key: {}}])
    assert str(error.value) == (
        f"capture_time_hooks of callable 1 (Sequential): unknown key {key!r}; the keys are ('forward_pre_hooks', "
        "'forward_hooks', 'backward_pre_hooks', 'backward_hooks')"
    )


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ({"forward_hooks": {}}, "capture_time_hooks must be a list with one entry for each callable, got the dict {"),
        ([None, [print]], "capture_time_hooks of callable 1 (Sequential) must be a dict of the keys ("),
        ([None, {"forward_hooks": [print]}], "of callable 1 (Sequential): forward_hooks must be a dict of hooks by id"),
    ],
    ids=["a dict for all", "a list for one", "a list of one kind"],
)
def test_hooks_that_are_nested_otherwise_are_refused_by_name(hooks, said):
    with pytest.raises(TypeError, match=re.escape(said)):
        capture_two(hooks)


def test_a_hook_that_cannot_be_called_is_refused_by_name():
    with pytest.raises(
        TypeError, match=re.escape("of callable 1 (Sequential): forward_hooks[4] is not callable: 'no hook'")
    ):
        capture_two([None, {"forward_hooks": {4: "no hook"}}])


def returns_a_value(module):
    return "changed"


@pytest.mark.parametrize("kind", HOOK_KINDS)
def test_a_hook_that_returns_a_value_is_refused_by_name(kind):
    with pytest.raises(
        RuntimeError, match=rf"of callable 1 \(Sequential\): {kind} hook .*returns_a_value.* returned a value"
    ):
        capture_two([None, {kind: {0: returns_a_value}}])


def test_bad_hooks_are_refused_before_anything_runs():
    events = Events()
    with pytest.raises(ValueError, match="unknown key"):
        make_graphed_callables(
            (events.module("a"), events.module("b")),
            inputs(2),
            pre_warmup_hook=lambda: events("before warm-up"),
            capture_time_hooks=[events.hooks("a"), {"unknown": {}}],
        )
    assert events.seen == []


REGISTER = {
    "_forward_pre_hooks": torch.nn.Module.register_forward_pre_hook,
    "_forward_hooks": torch.nn.Module.register_forward_hook,
    "_backward_pre_hooks": torch.nn.Module.register_full_backward_pre_hook,
    "_backward_hooks": torch.nn.Module.register_full_backward_hook,
}


@pytest.mark.parametrize("register", REGISTER.values(), ids=REGISTER.keys())
def test_a_module_that_still_has_hooks_is_refused_by_name(register):
    module = torch.nn.Linear(3, 3).cuda()
    register(module, lambda *given: None)
    with pytest.raises(RuntimeError, match=r"callable 1 \(Linear\) has hooks.*capture_time_hooks"):
        make_graphed_callables((torch.nn.Linear(3, 3).cuda(), module), inputs(2))
