"""Test quantized callables with a stub of TransformerEngine; tests/gpu uses the real one."""

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables
from tests.support.layers import small_transformer_engine
from tests.support.layers.small_transformer_engine import DotProductAttention, Linear, State, autocast

from .captured_cases import Forward, assert_same_bits, copies, descend, device_tensor

pytestmark = pytest.mark.usefixtures("cpu_backend")


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """Install the stub of TransformerEngine."""
    return small_transformer_engine.installed(monkeypatch)


def capture(layers, **options):
    """Capture layers as one chunk, quantized by default."""
    samples = tuple((device_tensor(4, 6, seed=77),) for _ in layers)
    options = {"enabled": True, "recipe": "recipe", "_order": [1, -1], **options}
    return make_graphed_callables(tuple(layers), samples, **options)


def train(graphed: bool, caches: bool = False, enabled: tuple[bool, bool] = (True, True)) -> list:
    """Train two layers; return losses, gradients, cached weights and FP8 statistics.

    ``enabled`` selects the quantized layers. If ``caches``, micro-batches share quantized weights.
    """
    torch.manual_seed(4)
    State.reset()
    layers = [Linear(), Linear()]
    called = capture(layers, enabled=enabled, cache_quantized_params=caches) if graphed else layers
    numbers = []
    for step in range(5):
        for microbatch in range(2):
            x = hidden = device_tensor(4, 6, seed=2 * step + microbatch)
            extra = {"is_first_microbatch": microbatch == 0} if caches else {}
            with autocast(enabled=any(enabled), recipe="recipe"):
                for layer, quantized in zip(called, enabled, strict=True):
                    with autocast(enabled=quantized, recipe="recipe"):
                        hidden = layer(hidden, **extra)
            loss = hidden.square().mean()
            loss.backward()
            numbers += copies([loss, x.grad])
        for layer in layers:
            numbers += copies([layer.weight.grad, layer.cached, layer.fp8_meta["scale"], layer.fp8_meta["amax"]])
        descend([layer.weight for layer in layers])
    return numbers


@pytest.mark.parametrize("caches", [False, True], ids=["weights quantized anew", "cached weights"])
@pytest.mark.parametrize("enabled", [(True, True), (True, False), (False, True)], ids=str)
def test_training_is_bit_identical_to_eager(enabled, caches):
    assert_same_bits(train(True, caches, enabled), train(False, caches, enabled))


def test_cached_weights_are_quantized_in_first_micro_batch():
    layer = Linear()
    (graphed,) = capture([layer], cache_quantized_params=True)
    cached = []
    for is_first in (True, False, True):
        with autocast(enabled=True, recipe="recipe"):
            graphed(device_tensor(4, 6), is_first_microbatch=is_first)
        cached += copies([layer.cached])
        with torch.no_grad():
            layer.weight.mul_(3)
    first, second, third = cached
    assert torch.equal(first, second)
    assert not torch.equal(second, third)


def test_failed_capture_restores_statistics():
    def body(linear, x):
        if torch.cuda.is_current_stream_capturing():
            raise KeyError("in capture")
        return linear(x)

    layer = Forward(body)
    layer.linear = Linear()
    before = copies(layer.linear.fp8_meta.values())
    with pytest.raises(KeyError):
        capture([layer])
    assert_same_bits(list(layer.linear.fp8_meta.values()), before)
    assert (State.enabled, State.capturing, State.depth) == (False, False, 0)


def test_autocast_gets_the_given_arguments(monkeypatch, engine):
    given = []

    class Noting(autocast):
        def __init__(self, **arguments):
            given.append(arguments)
            super().__init__(**arguments)

    monkeypatch.setattr(engine, "autocast", Noting)
    capture([Linear()], calibrating=True, recipe="a recipe", amax_reduction_group="a group", num_warmup_iters=1)
    expected = {
        "enabled": True,
        "calibrating": True,
        "recipe": "a recipe",
        "amax_reduction_group": "a group",
        "_graph": True,
    }
    assert given == [expected, expected]  # warm-up and capture


def test_reduction_of_a_refused_replay_is_left_to_the_next():
    (graphed,) = capture([Linear()])
    with autocast(enabled=True, recipe="recipe"):
        with pytest.raises(ValueError, match="but called with"):
            graphed(device_tensor(3, 6))
        output = graphed(device_tensor(4, 6))
    State.reductions.clear()
    output.sum().backward()
    assert State.reductions == ["backward"]


def metas_after_a_replay(layer, recipe="recipe"):
    """Return the statistics that a replay registers for reduction."""
    (graphed,) = capture([layer], recipe=recipe)
    with autocast(enabled=True, recipe=recipe, amax_reduction_group="group"):
        graphed(device_tensor(4, 6))
    return State.metas


def test_replays_register_statistics_of_run_modules():
    layer = Forward(lambda linear, x: linear(x))
    layer.linear, layer.unused = Linear(), Linear()
    metas = metas_after_a_replay(layer)
    assert len(metas) == 1 and metas[0] is layer.linear.fp8_meta
    assert (metas[0]["recipe"], metas[0]["fp8_group"]) == ("recipe", "group")


class AttentionOfMegatron(DotProductAttention):
    """A subclass of TransformerEngine's attention, as megatron-core defines one."""


def test_attention_registers_if_the_recipe_quantizes_it():
    class Recipe:
        fp8_dpa = True

    for recipe, registered in (("recipe", []), (Recipe(), [True])):
        State.reset()
        layer = Forward(lambda attention, x: attention(x))
        layer.linear = AttentionOfMegatron()
        assert [meta is layer.linear.fp8_meta for meta in metas_after_a_replay(layer, recipe)] == registered


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_cached_weights_require_is_first_microbatch(value):
    (graphed,) = capture([Linear()], cache_quantized_params=True)
    with pytest.raises(ValueError, match=r"cache_quantized_params need is_first_microbatch=True or False"):
        graphed(device_tensor(4, 6), is_first_microbatch=value)


@pytest.mark.parametrize(
    ("enabled", "error", "message"),
    [
        ("yes", TypeError, "enabled must be a bool or a tuple with one bool per callable"),
        ((True, 1), TypeError, "enabled must be a bool or a tuple with one bool per callable"),
        ((True,), ValueError, "enabled must have one entry for each of 2 callables, got 1"),
        ((False, True), TypeError, r"callable 1 is .*: set enabled\[1\] to False"),
    ],
    ids=str,
)
def test_invalid_enabled_is_refused(enabled, error, message):
    with pytest.raises(error, match=message):
        capture([Linear(), lambda x: x], enabled=enabled)


@pytest.mark.parametrize("name", ["enabled", "calibrating"])
def test_quantization_without_transformer_engine_is_refused(monkeypatch, name):
    import sys

    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    arguments = {"enabled": False, "recipe": None, name: True}
    with pytest.raises(RuntimeError, match=f"{name}=True needs TransformerEngine, which cannot be imported"):
        capture([Linear()], **arguments)
