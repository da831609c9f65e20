"""Test local graphs of quantized layers with a miniature TransformerEngine; tests/gpu uses the real one."""

import pytest
import torch

from megatron.core.transformer.cuda_graphs import CudaGraphManager, create_cudagraphs, delete_cuda_graphs
from tests.support.layers import small_transformer_engine
from tests.support.layers.small_transformer_engine import Linear, State, autocast

from ..engine.captured_cases import assert_same_bits, copies, descend, device_tensor
from .local_graph_cases import config, groups, use_graphable_rng

pytestmark = pytest.mark.usefixtures("cpu_backend")


@pytest.fixture(autouse=True)
def engine(cpu_backend, monkeypatch):
    """Install the miniature TransformerEngine, and delete all graphs before and after the test."""
    small_transformer_engine.installed(monkeypatch)
    delete_cuda_graphs()
    yield
    delete_cuda_graphs()


class Layer(torch.nn.Module):
    """A layer that caches its quantized weight like Megatron's layers."""

    def __init__(self, graphs):
        super().__init__()
        self.config = config()
        self.product = Linear()
        self.is_first_microbatch = False
        if graphs:
            self.cudagraph_manager = CudaGraphManager(self.config, pg_collection=groups())

    def forward(self, x):
        is_first, self.is_first_microbatch = self.is_first_microbatch, False
        return self.product(x, is_first_microbatch=is_first)

    def __call__(self, x):
        if hasattr(self, "cudagraph_manager"):
            return self.cudagraph_manager(self, (x,), {})
        return super().__call__(x)


def train(graphed, quantized=(True, True), per_layer=False):
    """Train two layers; return losses, gradients, weights and FP8 statistics, and ``State.reductions``.

    ``quantized`` selects the quantized layers. Each layer has its own autocast. Unless
    ``per_layer``, an outer autocast surrounds all layers.
    """
    torch.manual_seed(4)
    use_graphable_rng()
    State.reset()
    layers = [Layer(graphed), Layer(graphed)]
    numbers = []
    for step in range(5):
        for microbatch in range(2):
            if microbatch == 0:
                for layer in layers:
                    for module in layer.modules():
                        if hasattr(module, "is_first_microbatch"):
                            module.is_first_microbatch = True
            x = hidden = device_tensor(4, 6, seed=2 * step + microbatch)
            with autocast(enabled=not per_layer, recipe="recipe"):
                for layer, enabled in zip(layers, quantized, strict=True):
                    with autocast(enabled=enabled, recipe="recipe"):
                        hidden = layer(hidden)
            loss = hidden.square().mean()
            loss.backward()
            numbers += copies([loss, x.grad])
        for layer in layers:
            product = layer.product
            numbers += copies(
                [product.weight.grad, product.cached, product.fp8_meta["scale"], product.fp8_meta["amax"]]
            )
        create_cudagraphs()  # quantizes weights, which the next step repeats
        descend([layer.product.weight for layer in layers])
    return numbers, State.reductions


@pytest.mark.parametrize(
    ("quantized", "per_layer"),
    [((True, True), False), ((True, False), False), ((False, True), False), ((True, True), True)],
)
def test_training_equals_eager(quantized, per_layer):
    (graphed, reductions), (eager, expected) = (train(graphs, quantized, per_layer) for graphs in (True, False))
    assert_same_bits(graphed, eager)
    assert reductions == expected
    assert "backward" in expected
