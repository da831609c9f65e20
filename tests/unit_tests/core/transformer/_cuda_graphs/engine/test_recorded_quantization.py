"""Test graphs that update FP8 statistics, with a stub of TransformerEngine."""

from collections import deque

import pytest
import torch

from megatron.core.transformer._cuda_graphs.engine.captured import GraphedCallable, capture_passes
from megatron.core.transformer._cuda_graphs.engine.plan import unordered_plan
from megatron.core.transformer._cuda_graphs.engine.quantization import RecordedQuantization
from tests.support.layers import small_transformer_engine
from tests.support.layers.small_transformer_engine import QuantizedProduct, State, autocast

from .captured_cases import assert_same_bits, copies, descend, device_tensor

pytestmark = pytest.mark.usefixtures("cpu_backend")


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """Install the stub of TransformerEngine."""
    return small_transformer_engine.installed(monkeypatch)


class Layer(torch.nn.Module, QuantizedProduct):
    """Caches its quantized weight like Megatron's layers, and accumulates gradients like Megatron-FSDP."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 6, device="cuda") / 2)
        self.set_up()
        self.is_first_microbatch, self.caches = True, True
        self.total = torch.zeros_like(self.weight)
        self.weight.register_post_accumulate_grad_hook(self._add)

    def _add(self, weight):
        self.total += weight.grad
        weight.grad = None

    def forward(self, x):
        output = self.product(x, self.is_first_microbatch if self.caches else None)
        self.is_first_microbatch = False
        return output


class Model:
    """Two layers under FP8 autocast."""

    def __init__(self, recipe="recipe", caches=True):
        torch.manual_seed(4)
        self.layers = torch.nn.Sequential(Layer(), Layer())
        self.recipe, self.caches = recipe, caches

    def capture(self, engine):
        manager, delayed = engine.FP8GlobalStateManager, self.recipe != "tensorwise"
        recorded = RecordedQuantization(manager, self.layers, delayed, self.caches)
        passes = GraphedCallable(
            *("model", self.losses, (), {"x": device_tensor(4, 6).detach()}),
            module=self.layers,
            quantization=recorded,
            holds_hooks=True,
        )
        capture_passes(unordered_plan(1), [passes], num_warmup_iters=2, contexts=[recorded.preserved()])
        for layer in self.layers:
            layer.total.zero_()
        return passes

    def losses(self, x):
        with autocast(recipe=self.recipe):
            return self.layers(x).square().mean(-1)

    def begin_step(self):
        for layer in self.layers:
            layer.is_first_microbatch = True

    def numbers(self):
        tensors = [(layer.total, layer.cached, *self.statistics(layer)) for layer in self.layers]
        return copies([tensor for own in tensors for tensor in own])

    @staticmethod
    def statistics(layer):
        return [layer.fp8_meta["scale"], layer.fp8_meta["amax"]]

    def step(self):
        for layer in self.layers:
            layer.weight.grad = layer.total.clone()
            layer.total.zero_()
        descend([layer.weight for layer in self.layers])


def train(engine, model, captured_after=None):
    """Train; return losses, gradients, quantized weights and FP8 statistics.

    If ``captured_after`` is set, capture after that many steps and then replay.
    """
    numbers, passes = [], None
    for step in range(5):
        if step == captured_after:
            passes = model.capture(engine)
        model.begin_step()
        for microbatch in range(3):
            x = device_tensor(4, 6, seed=3 * step + microbatch).detach()
            losses = model.losses(x) if passes is None else passes.replay([x])
            losses.sum().backward()
            numbers += copies([losses])
        numbers += model.numbers()
        model.step()
    return numbers


@pytest.mark.parametrize("recipe", ["recipe", "tensorwise"])
@pytest.mark.parametrize("captured_after", [0, 2])
def test_training_is_bit_identical_to_eager(engine, recipe, captured_after):
    expected = train(engine, Model(recipe))
    State.reset()
    assert_same_bits(train(engine, Model(recipe), captured_after), expected)


def test_replays_update_statistics_without_the_host(engine):
    model = Model()
    passes = model.capture(engine)
    State.reductions.clear()
    before = copies(model.statistics(model.layers[0]))
    passes.replay([device_tensor(4, 6, seed=9).detach()]).sum().backward()
    assert State.reductions == []
    assert not torch.equal(model.layers[0].fp8_meta["scale"], before[0])


def test_capture_restores_statistics_of_all_modules(engine):
    model, other = Model(), Layer()
    with autocast(recipe="recipe"):
        other(device_tensor(4, 6))
    layers = [*model.layers, other]
    before = [copies(model.statistics(layer)) for layer in layers]
    model.capture(engine)
    for layer, values in zip(layers, before, strict=True):
        assert_same_bits(model.statistics(layer), values)


def test_failed_capture_restores_statistics_and_flag(engine):
    model = Model(caches=False)
    State.set_skip_fp8_weight_update_tensor(True)
    flag = State.quantization_state.skip_fp8_weight_update_tensor
    State.quantization_state.fp8_tensors_recompute_buffer.append(deque(["a later pass"]))
    before = model.numbers()

    def fail(*call):
        if torch.cuda.is_current_stream_capturing():
            State.quantization_state.fp8_tensors_recompute_buffer[0].append("the capture")
            State.quantization_state.fp8_tensors_recompute_buffer.append(deque(["a first pass"]))
            raise KeyError("in capture")

    model.layers[1].register_forward_hook(fail)
    with pytest.raises(KeyError):
        model.capture(engine)
    assert_same_bits([model.statistics(layer)[0] for layer in model.layers], before[2::4])
    assert State.quantization_state.skip_fp8_weight_update_tensor is flag and flag.item() == 1
    assert (State.enabled, State.capturing, State.depth) == (False, False, 0)
    stashed = [list(queue) for queue in State.quantization_state.fp8_tensors_recompute_buffer]
    assert stashed == [["a later pass"], []]


def test_uncached_weights_are_quantized_in_each_replay(engine):
    State.set_skip_fp8_weight_update_tensor(True)
    model = Model(caches=False)
    for layer in model.layers:
        layer.caches = False
    passes = model.capture(engine)
    assert not any(layer._fp8_workspaces for layer in model.layers)
    model.begin_step()
    x = device_tensor(4, 6).detach()
    before = copies([passes.replay([x])])
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.mul_(3)
    assert not torch.equal(passes.replay([x]), before[0])
    assert State.quantization_state.skip_fp8_weight_update_tensor.item() == 1
