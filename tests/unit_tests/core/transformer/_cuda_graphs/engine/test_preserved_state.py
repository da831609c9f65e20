"""Test that a capture, even a failed one, preserves the state of the process."""

import gc
import sys
from contextlib import suppress
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from megatron.core.transformer._cuda_graphs.hooks import HOOK_KINDS, extracted_hooks

from .captured_cases import CASES, Case, Forward, assert_same_bits, copies, device_tensor, mlp, train

pytestmark = pytest.mark.usefixtures("cpu_backend")

HOOK_DICTS = [name for name in vars(torch.nn.Module()) if "_hooks" in name]


def state_of(module):
    """Return the state that a capture of ``module`` must preserve, as comparable values."""
    return {
        "stream": torch.cuda.current_stream(),
        "capturing": torch.cuda.is_current_stream_capturing(),
        "garbage collection": gc.isenabled(),
        "device generator": torch.cuda.get_rng_state().tolist(),
        "host generator": torch.get_rng_state().tolist(),
        "values": [tensor.tolist() for tensor in module.state_dict().values()],
        "gradients": [param.grad for param in module.parameters()],
        "hooks": [[list(getattr(m, name).items()) for name in HOOK_DICTS] for m in module.modules()],
        "forward": module.forward,
        "attributes": [sorted(vars(m)) for m in module.modules()],
        "mode": module.training,
    }


class Failure(Exception):
    """Raised by failing layers and hooks."""


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.fail()
        return grad * 1, None


def fail_in(phase):
    """Return a function that raises only in ``phase`` (warm-up or capture)."""

    def fail(*unused):
        if torch.cuda.is_current_stream_capturing() == (phase == "capture"):
            raise Failure

    return fail


def raise_failure(*unused):
    raise Failure


def in_capture_only(kind):
    """Return a capture-time hook of ``kind`` that raises in the capture, which is its second call."""
    count = []

    def hook(*call):
        count.append(1)
        if len(count) == 2:
            raise Failure

    return {kind: {0: hook}}


def forward_failing(phase):
    def body(linear, x):
        y = torch.nn.functional.dropout(linear(x), 0.5)
        fail_in(phase)()
        return y

    return body


def backward_failing(phase):
    def body(linear, x):
        return FailingBackward.apply(torch.nn.functional.dropout(linear(x), 0.5), fail_in(phase))

    return body


def synchronizing(linear, x):
    return linear(x) * (2.0 if torch.nn.functional.dropout(linear(x), 0.5).sum().item() > 0 else 1.0)


def synchronizing_backward(linear, x):
    y = linear(x)
    y.register_hook(lambda grad: grad * grad.sum().item())
    return y


def dropping(linear, x):
    return torch.nn.functional.dropout(linear(x), 0.5)


# By description: forward body, capture options, expected error.
FAILURES: dict[str, tuple] = {
    "forward in warm-up": (forward_failing("warm-up"), {}, Failure),
    "backward in warm-up": (backward_failing("warm-up"), {}, Failure),
    "forward in capture": (forward_failing("capture"), {}, Failure),
    "backward in capture": (backward_failing("capture"), {}, Failure),
    "a host sync in forward": (synchronizing, {}, RuntimeError),
    "a host sync in backward": (synchronizing_backward, {}, RuntimeError),
    "an output that is not a tensor": (lambda linear, x: (dropping(linear, x), 3), {}, TypeError),
    "pre_warmup_hook": (dropping, {"pre_warmup_hook": raise_failure}, Failure),
    "post_warmup_hook": (dropping, {"post_warmup_hook": raise_failure}, Failure),
    **{
        f"{kind} in capture": (dropping, {"capture_time_hooks": [in_capture_only(kind), None]}, Failure)
        for kind in HOOK_KINDS
    },
}


def failed_capture(body, options, error):
    """Assert that capturing a module with ``body`` together with an MLP raises ``error``.

    Returns:
        The module, and its state before the capture.
    """
    module, other = torch.nn.Sequential(Forward(body)), mlp()
    torch.nn.Dropout(0.5)(torch.ones(3, device="cuda"))  # advances the generator from its initial state
    for m in module.modules():
        m.register_forward_pre_hook(lambda *given: None)
        m.register_forward_hook(lambda *given: None, with_kwargs=True)
    before = state_of(module)
    with pytest.raises(error), extracted_hooks([module]):
        make_graphed_callables(
            (module, other), ((device_tensor(4, 6),), (device_tensor(4, 6),)), num_warmup_iters=1, **options
        )
    return module, before


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
def test_failed_capture_restores_state(failure):
    expected = train(CASES["dropout"], None, steps=1)
    module, before = failed_capture(*failure)
    assert state_of(module) == before
    assert_same_bits(train(CASES["dropout"], make_graphed_callables, steps=1), expected)


def test_capture_changes_only_replaying_methods():
    module = Forward(dropping)
    before = state_of(module)
    make_graphed_callables(module, (device_tensor(4, 6),))
    after = state_of(module)
    assert after.pop("forward") != before.pop("forward")
    replaying = ["forward", "reset", "backward_dw"]
    assert after.pop("attributes")[0] == sorted([*before.pop("attributes")[0], *replaying])
    assert after == before


@pytest.mark.parametrize("body", [dropping, forward_failing("capture")], ids=["success", "failure"])
@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
def test_garbage_collection_is_paused_in_captures(enabled, body):
    seen = []

    def observed(linear, x):
        seen.append(gc.isenabled())
        return body(linear, x)

    try:
        if not enabled:
            gc.disable()
        with suppress(Failure):
            make_graphed_callables(Forward(observed), (device_tensor(4, 6),), num_warmup_iters=1)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert seen == [False, False]


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_are_restored(fails):
    norm = torch.nn.BatchNorm1d(6).cuda()
    before = copies(list(norm.buffers()))

    def fail():
        raise Failure

    with suppress(Failure):
        make_graphed_callables(norm, (device_tensor(4, 6),), post_warmup_hook=fail if fails else None)
    assert_same_bits(list(norm.buffers()), before)


class _Reassigning(torch.nn.Module):
    """Counts its calls in a buffer that each call reassigns."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6).cuda()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), device="cuda"))

    def forward(self, x):
        self.calls = self.calls + 1
        if "new" not in self._buffers:
            self.register_buffer("new", x.detach() * 2)
        return self.linear(x) * self.calls


def test_graph_reads_reassigned_buffer_in_place():
    module = _Reassigning()
    before = module.calls
    graphed = make_graphed_callables(module, (device_tensor(4, 6),))
    assert graphed.calls is before
    x = device_tensor(4, 6, seed=3)
    for calls in range(3):
        module.calls.fill_(calls)
        assert torch.equal(graphed(x), module.linear(x) * (calls + 1))


@pytest.fixture
def tracker():
    """Return Megatron's RNG tracker, reset and with graph-safe states."""
    tensor_parallel_random.initialize_rng_tracker(use_cudagraphable_rng=True)
    tracker = tensor_parallel_random.get_cuda_rng_tracker()
    tracker.reset()
    return tracker


def forked(linear, x):
    with tensor_parallel_random.get_cuda_rng_tracker().fork("layer"):
        return torch.nn.functional.dropout(linear(x), 0.5)


def test_dropout_from_rng_tracker_is_bit_identical_to_eager(tracker):
    case = Case(lambda: Forward(forked))

    def trained(capture):
        tracker.reset()
        tracker.add("layer", 77)
        numbers = train(case, capture)
        return [*numbers, tracker.get_states()["layer"].get_state()]

    graphed, eager = trained(make_graphed_callables), trained(None)
    assert_same_bits(graphed, eager)
    masks = [numbers == 0 for numbers in eager[0:10:5]]
    assert not torch.equal(*masks), "every step drops the same elements"


@pytest.mark.parametrize("body", [dropping, forward_failing("capture")], ids=["success", "failure"])
def test_rng_tracker_is_restored(tracker, body):
    tracker.add("layer", 77)

    def in_fork(linear, x):
        with tracker.fork("layer"):
            return body(linear, x)

    before = tracker.get_states()["layer"].get_state()
    with suppress(Failure):
        make_graphed_callables(Forward(in_fork), (device_tensor(4, 6),))
    assert torch.equal(tracker.get_states()["layer"].get_state(), before)


def test_unusable_rng_tracker_is_refused():
    tensor_parallel_random.initialize_rng_tracker()
    tensor_parallel_random.get_cuda_rng_tracker().add("layer", 77)
    with pytest.raises(RuntimeError, match=r"Add --te-rng-tracker, or, .*use_cudagraphable_rng=True"):
        make_graphed_callables(Forward(dropping), (device_tensor(4, 6),))


@pytest.fixture
def flag(monkeypatch):
    """Install a stub of TransformerEngine's graph module, and return its capture flag."""
    flag = SimpleNamespace(on=False)
    graph = ModuleType("transformer_engine.pytorch.graph")
    graph.__dict__["is_graph_capturing"] = lambda: flag.on
    graph.__dict__["set_capture_start"] = lambda: setattr(flag, "on", True)
    graph.__dict__["set_capture_end"] = lambda: setattr(flag, "on", False)
    monkeypatch.setitem(sys.modules, graph.__name__, graph)
    return flag


def test_capture_flag_of_transformer_engine_is_set(flag):
    seen = []

    def observed(x):
        seen.append(flag.on)
        return x * 2

    make_graphed_callables(observed, (device_tensor(3),), num_warmup_iters=1)
    assert seen == [True, True]
    assert not flag.on
