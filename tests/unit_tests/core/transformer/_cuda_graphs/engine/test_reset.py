"""reset: graphs are freed, and a module can be captured again."""

import gc
import weakref

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables

from .captured_cases import (
    CASES,
    assert_same_bits,
    device_tensor,
    mlp,
    product,
    train,
)

pytestmark = pytest.mark.usefixtures("cpu_backend")


def test_a_function_that_was_reset_refuses_to_replay():
    graphed = make_graphed_callables(product, (device_tensor(4, 6), device_tensor(4, 6)))
    graphed.reset()
    with pytest.raises(RuntimeError, match=r"graphs of callable 0 \(product\) were reset"):
        graphed(device_tensor(4, 6), device_tensor(4, 6))


def test_a_module_that_was_reset_has_its_own_methods():
    module = mlp()
    module.forward = own = module.forward
    assert make_graphed_callables(module, (device_tensor(4, 6),)) is module
    assert module.forward is not own
    module.reset()
    assert module.forward is own
    assert not hasattr(module, "reset")


def test_a_backward_pass_after_reset_is_refused():
    module = make_graphed_callables(mlp(), (device_tensor(4, 6),))
    output = module(device_tensor(4, 6))
    module.reset()
    with pytest.raises(RuntimeError, match="has no backward graph"):
        output.sum().backward()


def test_a_module_that_was_reset_can_be_captured_again():
    def capture_twice(func, args, sample_kwargs):
        make_graphed_callables(func, args).reset()
        return make_graphed_callables(func, args)

    assert_same_bits(train(CASES["dropout"], capture_twice), train(CASES["dropout"], None))


def test_a_module_with_graphs_is_not_captured_again():
    module = make_graphed_callables(mlp(), (device_tensor(4, 6),))
    with pytest.raises(RuntimeError, match=r"callable 0 \(Sequential\) has graphs already, in Sequential"):
        make_graphed_callables(module, (device_tensor(4, 6),))


def test_reset_frees_the_static_tensors():
    x = device_tensor(4, 6)
    module = make_graphed_callables(mlp(), (x,))
    freed = weakref.ref(x)
    output = weakref.ref(module.forward.outputs[0])
    module.reset()
    del x
    gc.collect()
    assert (freed(), output()) == (None, None)


def test_a_failed_capture_frees_the_graphs_that_it_had_made(monkeypatch):
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
