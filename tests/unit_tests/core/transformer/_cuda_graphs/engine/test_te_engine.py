"""te_engine: what TransformerEngine's engine leaves behind when it fails is cleaned up."""

import gc
import sys
from types import ModuleType

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.te_engine import recover_te_engine

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


def test_after_a_failure_the_modules_have_the_hooks_that_they_had():
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module[0].register_forward_hook(lambda *call: None)
    before = [dict(part._forward_hooks) for part in module.modules()]

    def engine_that_fails():
        with recover_te_engine(torch.cuda.graph_pool_handle(), [module]):
            for part in module.modules():
                part.register_forward_hook(lambda *call: None)
            raise Failure

    with pytest.raises(Failure):
        engine_that_fails()
    assert [dict(part._forward_hooks) for part in module.modules()] == before


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
