"""graph_capture: the helper's guards around an engine that does not guard the process itself."""

import gc
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, initialize_rng_tracker
from megatron.core.transformer._cuda_graphs.engine.capture import Capture, recover_te_engine
from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from megatron.core.transformer._cuda_graphs.engine.preserve import hide_grads_and_hooks, preserve_buffers
from megatron.core.transformer._cuda_graphs.engine.rng import generator_states, preserve_rng

from .captured_cases import CASES, assert_same_bits, train

pytestmark = pytest.mark.usefixtures("cpu_backend")


class Failure(Exception):
    """Raised in place of an engine's."""


def failing_engine(pool):
    """Fails in the middle of a capture and cleans up nothing."""
    gc.disable()
    torch.cuda.set_stream(torch.cuda.Stream())
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool)
    torch.ones(3, device="cuda").mul_(2)
    try:
        raise Failure
    except Failure:
        graph.capture_end()
        raise


def test_an_engine_that_failed_leaves_the_stream_and_garbage_collection_as_they_were():
    stream, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    with pytest.raises(Failure), recover_te_engine(pool, []):
        failing_engine(pool)
    assert torch.cuda.current_stream() == stream
    assert gc.isenabled()


def test_garbage_collection_that_was_off_stays_off_after_a_failed_engine():
    pool = torch.cuda.graph_pool_handle()
    gc.disable()
    try:
        with pytest.raises(Failure), recover_te_engine(pool, []):
            failing_engine(pool)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_engine_that_succeeds_is_left_alone():
    stream = torch.cuda.Stream()
    outer = torch.cuda.current_stream()
    with recover_te_engine(torch.cuda.graph_pool_handle(), []):
        torch.cuda.set_stream(stream)
    after = torch.cuda.current_stream()
    torch.cuda.set_stream(outer)
    assert after == stream


def test_training_goes_on_eagerly_after_a_failed_engine():
    pool = torch.cuda.graph_pool_handle()
    with pytest.raises(Failure), recover_te_engine(pool, []):
        failing_engine(pool)
    first = train(CASES["dropout"], None)
    assert_same_bits(train(CASES["dropout"], None), first)


@pytest.mark.parametrize("error", [None, Failure], ids=["success", "failure"])
def test_buffers_hold_afterwards_what_they_held_before(error):
    module = torch.nn.BatchNorm1d(3).cuda()
    address = module.running_mean.data_ptr()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with preserve_buffers([torch.nn.Sequential(module)]):
            module(torch.randn(4, 3, device="cuda"))
            assert not torch.equal(module.running_mean, before["running_mean"])
            if error is not None:
                raise error
    except Failure:
        pass
    assert {name: torch.equal(buffer, before[name]) for name, buffer in module.named_buffers()} == {
        "running_mean": True,
        "running_var": True,
        "num_batches_tracked": True,
    }
    assert module.running_mean.data_ptr() == address


class _Buffer(torch.nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("buffer", buffer)


def test_buffers_that_are_expanded_are_left_alone():
    module = _Buffer(torch.ones(1, device="cuda").expand(4))
    with preserve_buffers([module]):
        pass
    assert module.buffer.tolist() == [1] * 4


def test_buffers_that_were_made_in_inference_mode_are_put_back_too():
    with torch.inference_mode():
        module = _Buffer(torch.ones(4, device="cuda"))
    with preserve_buffers([module]), torch.inference_mode():
        module.buffer.add_(1)
    assert module.buffer.tolist() == [1] * 4


def test_a_buffer_that_did_not_change_serves_a_backward_pass_that_saved_it():
    module = _Buffer(torch.full((4,), 3.0, device="cuda"))
    x = torch.ones(4, device="cuda", requires_grad=True)
    y = x * module.buffer
    with preserve_buffers([module]):
        pass
    y.sum().backward()
    assert x.grad.tolist() == [3] * 4


@pytest.mark.parametrize("error", [None, Failure], ids=["success", "failure"])
def test_generators_are_where_they_were(error):
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    try:
        with preserve_rng():
            torch.rand(3, device="cuda")
            torch.rand(3)
            if error is not None:
                raise error
    except Failure:
        pass
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_generators_of_transformer_engines_own_trackers_are_known(monkeypatch):
    distributed: Any = ModuleType("transformer_engine.pytorch.distributed")
    generator = torch.Generator("cuda")
    distributed.graph_safe_rng_available = lambda: True
    distributed.get_all_rng_states = lambda: {"dropout": generator}
    monkeypatch.setitem(sys.modules, distributed.__name__, distributed)
    assert generator_states() == [generator]
    # Megatron's own tracker may have a state of that name, which is another.
    initialize_rng_tracker(use_cudagraphable_rng=True, force_reset=True)
    get_cuda_rng_tracker().add("dropout", 3)
    states = generator_states()
    assert len(states) == 2
    assert generator in states


def test_the_graphs_of_a_capture_share_a_pool():
    capture = Capture(None)
    graphs = [capture.new_graph() for _ in range(2)]
    x = torch.ones(3, device="cuda")
    for graph in graphs:
        with capture.recording(graph):
            x * 2
    assert graphs[0].pool() == graphs[1].pool() == capture.pool


def test_a_capture_uses_the_pool_that_it_is_given():
    pool = torch.cuda.graph_pool_handle()
    assert Capture(pool).pool == pool


@pytest.mark.parametrize("step", ["capture_begin", "capture_end"])
def test_a_capture_that_cannot_begin_or_end_leaves_the_next_alone(step, monkeypatch):
    capture = Capture(None)
    real = getattr(torch.cuda.CUDAGraph, step)

    def fail_once(graph, *args, **kwargs):
        monkeypatch.setattr(torch.cuda.CUDAGraph, step, real)
        if step == "capture_begin":
            real(graph, *args, **kwargs)
        raise Failure

    monkeypatch.setattr(torch.cuda.CUDAGraph, step, fail_once)
    x = torch.ones(3, device="cuda")
    with pytest.raises(Failure), capture.recording(capture.new_graph()):
        x * 2
    assert not torch.cuda.is_current_stream_capturing()
    torch.randn(2, device="cuda")  # which generators in capture mode refuse
    graph = capture.new_graph()
    with capture.recording(graph):
        y = x * 3
    graph.replay()
    assert y.tolist() == [3, 3, 3]


def test_the_error_of_a_capture_is_raised_though_nothing_can_be_cleaned_up(monkeypatch):
    capture = Capture(None)
    graph = capture.new_graph()
    attempts: list[int] = []

    def fail(graph, *args, **kwargs):
        attempts.append(1)
        raise Failure(f"attempt {len(attempts)}")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", fail)
    with pytest.raises(Failure, match="attempt 1") as error, capture.recording(graph):
        raise AssertionError("not reached")
    assert error.value.__notes__ == ["What the failed capture left could not be cleaned up: attempt 2"]


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_are_bare_meanwhile_and_then_as_they_were(fails):
    param = torch.nn.Parameter(torch.ones(2))
    called: list[torch.Tensor] = []
    param.register_hook(called.append)
    grad = torch.full((2,), 5.0)
    param.grad = grad
    with suppress(Failure), hide_grads_and_hooks([param]):
        assert param.grad is None
        (param * 2).sum().backward()
        assert torch.equal(torch.tensor([2.0, 2.0]), param.grad)
        assert called == []
        if fails:
            raise Failure
    assert param.grad is grad
    (param * 2).sum().backward()
    assert len(called) == 1
    assert torch.equal(grad, torch.tensor([7.0, 7.0]))


LEGACY_STREAM = (
    "operation would make the legacy stream depend on a capturing blocking stream",
    "cudaErrorStreamCaptureImplicit",
    "operation failed due to a previous error during capture",
)


@pytest.mark.parametrize("message", LEGACY_STREAM)
def test_gradients_on_the_legacy_stream_are_explained(message):
    capture = Capture(None)
    with pytest.raises(RuntimeError) as error, capture.recording(capture.new_graph()):
        raise RuntimeError(f"CUDA error: {message}")
    assert "under torch.cuda.stream(...)" in error.value.__notes__[0]


class _OnLegacyStream(torch.autograd.Function):
    """Its backward leaves the legacy default stream current, as an AccumulateGrad node that was made there would."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        torch.cuda.set_stream(torch.cuda.default_stream())
        return grad


def on_legacy_stream(weight, x):
    return x @ _OnLegacyStream.apply(weight)


def leaf(*shape, requires_grad=True):
    return torch.ones(*shape, device="cuda", requires_grad=requires_grad)


@pytest.mark.parametrize(("weight", "x"), [(False, True), (True, False)], ids=["of an input", "of a parameter"])
def test_a_gradient_on_the_legacy_stream_is_refused_before_capture(weight, x):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(leaf(3, 3), requires_grad=weight)

        def forward(self, x):
            return on_legacy_stream(self.weight, x) if weight else on_legacy_stream(x, self.weight.t())

    captures = []
    with (
        mock.patch.object(torch.cuda.CUDAGraph, "capture_begin", lambda *args, **kwargs: captures.append(args)),
        pytest.raises(RuntimeError, match=r"callable 0 \(Layer\) cannot be captured.*under torch.cuda.stream"),
    ):
        make_graphed_callables(Layer(), (leaf(3, 3, requires_grad=x),))
    assert captures == []


def test_the_hooks_that_look_for_the_legacy_stream_are_gone_after_warm_up():
    layer = torch.nn.Linear(3, 3).cuda()
    make_graphed_callables(layer, (torch.ones(2, 3, device="cuda", requires_grad=True),))
    assert not any(param._backward_hooks for param in layer.parameters())


def test_other_errors_of_a_capture_get_no_explanation():
    capture = Capture(None)
    with pytest.raises(Failure) as error, capture.recording(capture.new_graph()):
        raise Failure
    assert not hasattr(error.value, "__notes__")


class _Layer(torch.nn.Module):
    pass


class _LayerWithCall(torch.nn.Module):
    def __call__(self, *args):
        return "its own"


def test_after_a_failure_the_classes_of_the_modules_have_their_own_call_and_transformer_engines_flag_is_down(
    monkeypatch,
):
    graph = ModuleType("transformer_engine.pytorch.graph")
    down, restored = [], []
    graph.__dict__.update(
        set_capture_end=lambda: down.append(True),
        save_fp8_tensors=lambda modules, recipe: (tuple(modules), recipe),
        restore_fp8_tensors=lambda modules, saved: restored.append(saved),
    )
    monkeypatch.setitem(sys.modules, graph.__name__, graph)
    layers = (_Layer(), _LayerWithCall())

    def engine_that_fails():
        with recover_te_engine(torch.cuda.graph_pool_handle(), layers, "recipe"):
            for layer in layers:
                type(layer).__call__ = lambda self, *args: "wrapped"  # type: ignore[method-assign]
            raise Failure

    with pytest.raises(Failure):
        engine_that_fails()
    assert "__call__" not in vars(_Layer)
    assert _LayerWithCall()() == "its own"
    assert down == [True]
    assert restored == [(layers, "recipe")]
