"""Test that ``reset`` frees graphs and allows recapture."""

import gc
import weakref

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables

from .captured_cases import CASES, assert_same_bits, device_tensor, mlp, product, train

pytestmark = pytest.mark.usefixtures("cpu_backend")


def test_replay_after_reset_is_refused():
    graphed = make_graphed_callables(product, (device_tensor(4, 6), device_tensor(4, 6)))
    graphed.reset()
    with pytest.raises(RuntimeError, match=r"graphs of callable 0 \(product\) were reset"):
        graphed(device_tensor(4, 6), device_tensor(4, 6))


def test_backward_after_reset_is_refused():
    module = make_graphed_callables(mlp(), (device_tensor(4, 6),))
    output = module(device_tensor(4, 6))
    module.reset()
    with pytest.raises(RuntimeError, match="has no backward graph"):
        output.sum().backward()


def test_module_can_be_captured_again_after_reset():
    def capture_twice(func, args, sample_kwargs):
        func.forward = own = func.forward
        make_graphed_callables(func, args).reset()
        assert func.forward is own
        assert not hasattr(func, "reset")
        return make_graphed_callables(func, args)

    assert_same_bits(train(CASES["dropout"], capture_twice), train(CASES["dropout"], None))


def test_reset_frees_static_tensors():
    x = device_tensor(4, 6)
    module = make_graphed_callables(mlp(), (x,))
    freed = weakref.ref(x)
    output = weakref.ref(module.forward.outputs[0])
    module.reset()
    del x
    gc.collect()
    assert (freed(), output()) == (None, None)


def test_failed_capture_frees_its_graphs(monkeypatch):
    resets: list[torch.cuda.CUDAGraph] = []
    reset = torch.cuda.CUDAGraph.reset
    monkeypatch.setattr(torch.cuda.CUDAGraph, "reset", lambda graph: reset(resets.append(graph) or graph))  # type: ignore[func-returns-value]

    def fails_in_capture(x):
        assert not torch.cuda.is_current_stream_capturing(), "capture failed"
        return x * 2

    modules = mlp(), fails_in_capture
    with pytest.raises(AssertionError, match="capture failed"):
        make_graphed_callables(modules, ((device_tensor(4, 6),), (device_tensor(3),)))
    assert len(resets) == 1
