"""Test that the engine on a GPU is bit-identical to eager and uses no more memory than TransformerEngine's."""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # must precede the import of TransformerEngine

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.graph import make_graphed_callables as transformer_engine
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megatron.core.transformer._cuda_graphs.engine.make_graphed_callables import make_graphed_callables as native
from tests.unit_tests.core.transformer._cuda_graphs.engine.captured_cases import (
    CASES,
    assert_same_bits,
    copies,
    descend,
    train,
)

STEPS = 10


@pytest.fixture(autouse=True)
def stream_of_its_own():
    """Run each test on a side stream: backward passes on the legacy default stream cannot be captured."""
    torch.manual_seed(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    FP8GlobalStateManager.reset()
    gc.collect()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_plain_callables_are_bit_identical_to_eager(case):
    assert_same_bits(train(case, native, STEPS), train(case, None, STEPS))


HIDDEN, SEQUENCE = 128, 128

MODULES = {
    "LayerNormLinear": lambda: te.LayerNormLinear(HIDDEN, HIDDEN),
    "LayerNormMLP": lambda: te.LayerNormMLP(HIDDEN, 2 * HIDDEN),
    "TransformerLayer": lambda: te.TransformerLayer(
        HIDDEN, 2 * HIDDEN, 4, hidden_dropout=0.1, attention_dropout=0.1, fuse_qkv_params=True
    ),
    "operations": lambda: te.ops.Sequential(te.ops.LayerNorm(HIDDEN), te.ops.Linear(HIDDEN, HIDDEN)),
}
RECIPES = {
    "bf16": None,
    "delayed scaling": DelayedScaling(amax_history_len=4),
    "current scaling": Float8CurrentScaling(),
}


@dataclass
class Training:
    """Training of two equal layers for ``STEPS`` steps of two micro-batches."""

    make: Callable[[], torch.nn.Module]
    recipe: Any = None
    caches: bool = False

    def run(self, engine: Callable | None) -> list[torch.Tensor | None]:
        """Train with graphs of ``engine``, or eagerly if None; return all losses, gradients and parameters."""
        torch.manual_seed(5)
        FP8GlobalStateManager.reset()
        layers = [self.make().to(dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        params = [param for layer in layers for param in layer.parameters()]
        called: Any = layers
        if engine is not None:
            called = engine(
                tuple(layers),
                tuple((self.inputs(99),) for _ in layers),
                _order=[1, -1],
                _num_layers_per_chunk=[2],
                _reuse_graph_input_output_buffers=True,
                enabled=self.recipe is not None,
                recipe=self.recipe,
                cache_quantized_params=self.caches,
            )
        numbers: list[torch.Tensor | None] = []
        for step in range(STEPS):
            for microbatch in range(2):
                x = self.inputs(2 * step + microbatch)
                hidden = x
                extra = {"is_first_microbatch": microbatch == 0} if self.caches else {}
                with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
                    for layer in called:
                        hidden = layer(hidden, **extra)
                loss = hidden.float().square().mean()
                loss.backward()
                numbers += copies([loss, x.grad])
            numbers += copies([param.grad for param in params])
            descend(params)
        return numbers + copies(params) + [torch.cuda.get_rng_state()]

    @staticmethod
    def inputs(seed: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.randn(
            SEQUENCE, 2, HIDDEN, generator=generator, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()


@pytest.mark.parametrize(
    ("module", "recipe", "caches"),
    [(module, recipe, False) for module in MODULES for recipe in RECIPES]
    + [(module, recipe, True) for module in list(MODULES)[:3] for recipe in list(RECIPES)[1:]],
)
def test_transformer_engine_modules_are_bit_identical_to_eager(module, recipe, caches):
    training = Training(MODULES[module], RECIPES[recipe], caches)
    assert_same_bits(training.run(native), training.run(None))


def test_missing_statistics_update_is_detected(monkeypatch):
    training = Training(MODULES["LayerNormLinear"], RECIPES["delayed scaling"])
    eager = training.run(None)
    monkeypatch.setattr(FP8GlobalStateManager, "add_fp8_tensors_to_global_buffer", lambda meta: None)
    with pytest.raises(AssertionError):
        assert_same_bits(training.run(native), eager)


def delayed_weight_gradients(engine: Callable | None, had_gradients: bool) -> list[torch.Tensor | None]:
    """Train two layers with ``delay_wgrad_compute``; return losses, gradients and final parameters.

    Args:
        engine: Engine that captures the layers; None to train eagerly.
        had_gradients: Whether parameters have gradients before capture.
    """
    torch.manual_seed(5)
    layers = [te.LayerNormLinear(HIDDEN, HIDDEN, delay_wgrad_compute=True, device="cuda") for _ in range(2)]
    params = [param for layer in layers for param in layer.parameters()]
    called: Any = layers
    if engine is not None:
        for param in params:
            param.grad = torch.ones_like(param) if had_gradients else None
        called = engine(
            tuple(layers),
            tuple((torch.randn(SEQUENCE, HIDDEN, device="cuda", requires_grad=True),) for _ in layers),
            _order=[1, 2, -2, -1, -2.5, -1.5],
            _num_layers_per_chunk=[1, 1],
            allow_unused_input=True,
        )
        for param in params:
            assert (param.grad is not None) == had_gradients
            param.grad = None
    numbers: list[torch.Tensor | None] = []
    for step in range(STEPS):
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(SEQUENCE, HIDDEN, generator=generator, device="cuda").requires_grad_()
        loss = called[1](called[0](x)).square().mean()
        loss.backward()
        for layer in reversed(called):
            layer.backward_dw()
        numbers += copies([loss, x.grad, *(param.grad for param in params)])
        descend(params)
    return numbers + copies(params)


@pytest.mark.parametrize("had_gradients", [False, True])
def test_delayed_weight_gradients_are_bit_identical_to_eager(had_gradients):
    # TransformerEngine's engine does not set grad: it supports modules that accumulate into main_grad.
    assert_same_bits(delayed_weight_gradients(native, had_gradients), delayed_weight_gradients(None, False))


def test_gradients_on_the_legacy_stream_are_refused():
    with torch.cuda.stream(torch.cuda.default_stream()):
        layer = torch.nn.Linear(8, 8).cuda()
        # Data-parallel wrappers keep this node alive.
        nodes = [param.expand_as(param).grad_fn.next_functions[0][0] for param in layer.parameters()]
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    with pytest.raises(RuntimeError, match="legacy default stream"):
        native(layer, (x,))
    assert len(nodes) == 2
    layer(x).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((8,), 4.0, device="cuda"))


def reserved() -> int:
    """Return the bytes of GPU memory still reserved after all unused memory is released."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def large_layers() -> tuple[tuple[torch.nn.Module, ...], tuple[tuple[torch.Tensor], ...]]:
    """Return eight layers with 32 MiB of weights each, and one 16 MiB input per layer.

    Each tensor of this size gets its own segment. The allocator packs smaller tensors into shared 20 MiB segments.
    """
    layers = tuple(
        torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).cuda()
        for _ in range(8)
    )
    return layers, tuple((torch.randn(4096, 1024, device="cuda", requires_grad=True),) for _ in layers)


def bytes_held(engine: Callable) -> int:
    """Return the bytes held by the graphs of eight layers."""
    layers, samples = large_layers()
    before = reserved()
    graphed = engine(
        layers,
        samples,
        _order=[1, -1],
        _reuse_graph_input_output_buffers=True,
        clone_param_grads_on_return=False,
    )
    held = reserved() - before
    assert len(graphed) == len(layers)
    return held


def test_graphs_hold_no_more_memory_than_transformer_engine():
    # Use the minimum: the first use of cuBLAS on a stream allocates a workspace.
    held = [(bytes_held(native), bytes_held(transformer_engine)) for _ in range(3)]
    ours, theirs = map(min, zip(*held, strict=True))
    assert ours <= theirs


def test_reset_frees_all_memory():
    layers, samples = large_layers()
    native(layers, samples, _order=[1, -1])  # allocates workspaces of cuBLAS
    before = reserved()
    graphed = native(layers, samples, _order=[1, -1])
    assert reserved() - before > 8 * 2**25
    for slot in graphed:
        slot.reset()
    assert reserved() <= before


def test_failed_capture_frees_all_memory():
    layers, samples = large_layers()
    layers[-1][-1].register_forward_hook(lambda module, args, output: output.sum().item() and None)
    before = reserved()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            native(layers, samples, _order=[1, -1])
    assert reserved() - before <= 2 * (2**25 + 2**20)  # cuBLAS workspaces; graphs would hold more than 1 GiB
