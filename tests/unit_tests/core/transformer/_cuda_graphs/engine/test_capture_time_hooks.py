"""Test that capture-time hooks run around every warm-up and capture pass, outside the graph."""

import re

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from megatron.core.transformer._cuda_graphs.hooks import HOOK_KINDS

from .captured_cases import device_tensor

pytestmark = pytest.mark.usefixtures("cpu_backend")


class Events:
    """Records events in order, marking events during a capture."""

    def __init__(self):
        self.seen: list[str] = []

    def __call__(self, event, *unused):
        self.seen.append(event + (" recorded" if torch.cuda.is_current_stream_capturing() else ""))

    def hooks(self, name):
        return {kind: {7: lambda *call, kind=kind: self(f"{name} {kind}")} for kind in HOOK_KINDS}

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
    """A linear layer that records when its forward and backward passes run."""

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


def test_hooks_run_in_order_in_warm_up_and_capture():
    events = Events()
    make_graphed_callables(
        (events.module("a"), events.module("b"), events.module("c")),
        inputs(3),
        num_warmup_iters=1,
        _order=[1, 2, -2, -1],
        _num_layers_per_chunk=[2, 1],
        pre_warmup_hook=lambda: events("before warm-up"),
        post_warmup_hook=lambda: events("after warm-up"),
        capture_time_hooks=[events.hooks(name) for name in "abc"],
    )

    def iteration(recorded=""):
        forward = [event for name in "abc" for event in forward_of(name, recorded)]
        return forward + [event for name in "cba" for event in backward_of(name, recorded)]

    assert events.seen == ["before warm-up", *iteration(), "after warm-up", *iteration(" recorded")]


def test_hooks_are_not_replayed():
    events = Events()
    graphed = make_graphed_callables(events.module("a"), inputs(1)[0], capture_time_hooks=[events.hooks("a")])
    events.seen.clear()
    graphed(device_tensor(2, 3)).sum().backward()
    assert events.seen == []


def test_backward_hooks_run_if_nothing_requires_grad():
    events = Events()
    hooks = events.hooks("a")
    make_graphed_callables(
        lambda x: x * 2, (device_tensor(3, grad=False),), num_warmup_iters=1, capture_time_hooks=[hooks]
    )
    assert events.seen == [f"a {kind}" for kind in HOOK_KINDS] * 2


def test_only_forward_hooks_run_in_evaluation_mode():
    events = Events()
    module = events.module("a").eval()
    make_graphed_callables(module, inputs(1)[0], num_warmup_iters=1, capture_time_hooks=[events.hooks("a")])
    assert events.seen == [*forward_of("a"), *forward_of("a", " recorded")]


def test_hooks_get_module_arguments_and_raw_output():
    calls: dict[str, list[tuple]] = {kind: [] for kind in HOOK_KINDS}
    x, scale = device_tensor(4), device_tensor(4, grad=False)

    def scaled(x, *, scale):
        return {"scaled": x * scale, "nothing": [None]}

    hooks = {kind: {0: lambda *call, kind=kind: calls[kind].append(call)} for kind in HOOK_KINDS}
    make_graphed_callables(scaled, (x,), num_warmup_iters=1, sample_kwargs={"scale": scale}, capture_time_hooks=[hooks])
    for iteration in range(2):
        func, args, kwargs = calls["forward_pre_hooks"][iteration]
        assert func is scaled and args[0] is x and kwargs["scale"] is scale
        func, args, output = calls["forward_hooks"][iteration]
        assert func is scaled and args[0] is x and output["scaled"].grad_fn is not None and output["nothing"] == [None]
        assert calls["backward_pre_hooks"][iteration] == calls["backward_hooks"][iteration] == (scaled,)
    assert calls["forward_pre_hooks"][0][2] is not calls["forward_pre_hooks"][1][2]  # hooks may change them


@pytest.mark.parametrize(
    ("hooks", "error", "message"),
    [
        ([None], ValueError, "capture_time_hooks must have 2 entries, got 1"),
        ([None, {"forward_pre": {}}], ValueError, "of callable 1 (Sequential): unknown key 'forward_pre'; use one of"),
        ({"forward_hooks": {}}, TypeError, "capture_time_hooks must be a list with one entry per callable, got"),
        ([None, [print]], TypeError, "capture_time_hooks of callable 1 (Sequential) must be a dict with the keys ("),
        ([None, {"forward_hooks": {4: "no hook"}}], TypeError, "forward_hooks must be a dict of hooks by id, got {4:"),
    ],
    ids=["number", "key", "a dict for all", "a list for one", "not callable"],
)
def test_invalid_hooks_are_refused_before_anything_runs(hooks, error, message):
    events = Events()
    modules = events.module("a"), torch.nn.Sequential(events.module("b"))
    with pytest.raises(error, match=re.escape(message)):
        make_graphed_callables(modules, inputs(2), capture_time_hooks=hooks)
    assert events.seen == []


def returns_a_value(*call):
    return "changed"


@pytest.mark.parametrize("kind", HOOK_KINDS)
def test_hook_with_return_value_is_refused(kind):
    with pytest.raises(
        RuntimeError, match=rf"of callable 0 \(Linear\): {kind} hook .*returns_a_value.* returned a value"
    ):
        make_graphed_callables(
            torch.nn.Linear(3, 3).cuda(), inputs(1)[0], capture_time_hooks=[{kind: {0: returns_a_value}}]
        )


REGISTER = {
    "_forward_pre_hooks": torch.nn.Module.register_forward_pre_hook,
    "_forward_hooks": torch.nn.Module.register_forward_hook,
    "_backward_pre_hooks": torch.nn.Module.register_full_backward_pre_hook,
    "_backward_hooks": torch.nn.Module.register_full_backward_hook,
}


@pytest.mark.parametrize("register", REGISTER.values(), ids=REGISTER.keys())
def test_module_with_hooks_is_refused(register):
    module = torch.nn.Linear(3, 3).cuda()
    register(module, lambda *given: None)
    with pytest.raises(RuntimeError, match=r"callable 1 \(Linear\) has hooks.*capture_time_hooks"):
        make_graphed_callables((torch.nn.Linear(3, 3).cuda(), module), inputs(2))
