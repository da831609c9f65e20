"""Emulate the FP8 of TransformerEngine 2.20: delayed and current scaling, and cached weights."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist

LEVELS = 1024.0  # quantization steps per scale
CURRENT = "tensorwise"  # recipe without statistics
INPUT, GRADIENT, WEIGHT = range(3)  # indices of a layer's statistics


class State:
    """Stand-in for ``FP8GlobalStateManager``."""

    enabled = capturing = first = False
    recipe = group = None
    depth = 0
    metas: list[dict[str, Any]] = []
    reductions: list[str] = []
    quantization_state: Any

    @classmethod
    def reset(cls) -> None:
        cls.enabled = cls.capturing = cls.first = False
        cls.recipe = cls.group = None
        cls.depth, cls.metas, cls.reductions = 0, [], []
        cls.quantization_state = SimpleNamespace(
            global_amax_history_buffer={},
            global_scale_buffer={},
            skip_fp8_weight_update_tensor=None,
            fp8_tensors_recompute_buffer=[],
        )

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        return cls.capturing or torch.cuda.is_current_stream_capturing()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.enabled

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls.recipe

    @classmethod
    def get_fp8_group(cls) -> Any:
        return cls.group

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        first, cls.first = cls.first, False
        return first

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        state = cls.quantization_state
        if state.skip_fp8_weight_update_tensor is None:
            state.skip_fp8_weight_update_tensor = torch.zeros(1, device="cuda")
        state.skip_fp8_weight_update_tensor.fill_(skip)

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, meta: dict[str, Any]) -> None:
        if meta.get("recipe") == CURRENT or any(meta is other for other in cls.metas):
            return
        cls.metas.append(meta)
        state = cls.quantization_state
        state.global_amax_history_buffer.setdefault("both", []).append(meta["amax"])
        state.global_scale_buffer.setdefault("both", []).append(meta["scale"])

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        cls.reductions.append("forward" if forward else "backward")
        places = [INPUT, WEIGHT] if forward else [GRADIENT]
        if not cls.metas:
            return
        amaxes = torch.stack([meta["amax"][place] for meta in cls.metas for place in places])
        group = cls.metas[0].get("fp8_group")
        if isinstance(group, dist.ProcessGroup) and group.size() > 1:
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group)
        scales = [(meta, place) for meta in cls.metas for place in places]
        for amax, (meta, place) in zip(amaxes, scales, strict=True):
            scale = meta["scale"][place]
            scale.copy_(torch.where(amax > 0, LEVELS / amax.clamp(min=1e-6), scale))
            meta["amax"][place].zero_()


class autocast:
    def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False):
        self._given = enabled, _graph, recipe, amax_reduction_group
        self.calibrating = calibrating

    def __enter__(self):
        self._outer = State.enabled, State.capturing, State.recipe, State.group, State.first
        State.enabled, State.capturing, State.recipe, State.group = self._given
        if State.depth == 0:
            State.first = True
        State.depth += 1
        return self

    def __exit__(self, *error):
        State.enabled, State.capturing, State.recipe, State.group, State.first = self._outer
        State.depth -= 1
        enabled, graph = self._given[:2]
        if enabled and not graph and State.depth == 0 and torch.is_grad_enabled():
            State.reduce_and_update_fp8_tensors(forward=True)


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x * scale).round() / scale


def _statistics() -> dict[str, Any]:
    """Return the initial FP8 scale and amax of an input, a weight and a gradient."""
    return {"scale": torch.full((3,), 64.0, device="cuda"), "amax": torch.zeros(3, device="cuda")}


def _quantized(
    x: torch.Tensor, meta: dict[str, Any], place: int, recipe: Any, skip: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x`` quantized with the scale at index ``place`` of ``meta``, or with current scaling.

    Delayed scaling also updates the amax in ``meta``, unless the device tensor ``skip`` is true.
    """
    amax = x.abs().max().float()
    if recipe == CURRENT:
        return rounded(x, LEVELS / amax.clamp(min=1e-6)).to(x.dtype)
    noted = meta["amax"][place]
    largest = torch.maximum(noted, amax)
    noted.copy_(largest if skip is None else torch.where(skip[0].bool(), noted, largest))
    return rounded(x, meta["scale"][place]).to(x.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, quantized_weight, meta, reduces):
        quantized = _quantized(x, meta, INPUT, State.recipe)
        ctx.save_for_backward(quantized, quantized_weight)
        ctx.meta, ctx.reduces, ctx.recipe = meta, reduces, State.recipe
        return quantized @ quantized_weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        quantized = _quantized(grad, ctx.meta, GRADIENT, ctx.recipe)
        of_weight = quantized.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.reduces and not sys.modules["transformer_engine.pytorch.graph"].is_graph_capturing():
            State.reduce_and_update_fp8_tensors(forward=False)
        return quantized @ weight, of_weight, None, None, None


class QuantizedProduct:
    """Mixin for modules with a quantized weight."""

    __module__ = "transformer_engine.pytorch.module.base"  # modules of this package change attributes between passes
    weight: torch.Tensor

    def set_up(self) -> None:
        self.fp8_meta = _statistics()
        self._fp8_workspaces: dict[str, torch.Tensor] = {}

    def get_fp8_meta_tensors(self) -> list[torch.Tensor]:
        return [self.fp8_meta[name].clone() for name in ("scale", "amax")]

    def reset_fp8_meta_tensors(self, values: list[torch.Tensor]) -> None:
        for name, value in zip(("scale", "amax"), values, strict=True):
            self.fp8_meta[name].copy_(value)

    @property
    def cached(self) -> torch.Tensor:
        return self._fp8_workspaces.get("weight", torch.zeros_like(self.weight))

    def product(self, x: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
        """Return the quantized ``x @ weight.t()``; requantize the weight if ``is_first_microbatch`` is True or None."""
        capturing, meta, recipe = State.fp8_graph_capturing(), self.fp8_meta, State.recipe
        skip = State.quantization_state.skip_fp8_weight_update_tensor if capturing else None
        if skip is not None:
            is_first_microbatch = False
        if not capturing:
            meta["recipe"], meta["fp8_group"] = recipe, State.group
            State.add_fp8_tensors_to_global_buffer(meta)
        weight = None if is_first_microbatch is None else self._fp8_workspaces.get("weight")
        given = self.weight.detach()
        if weight is None:
            weight = _quantized(given, meta, WEIGHT, recipe)
            if is_first_microbatch is not None:
                self._fp8_workspaces["weight"] = weight
        elif skip is not None:
            weight.data.copy_(torch.where(skip.bool(), weight, _quantized(given, meta, WEIGHT, recipe, skip)))
        elif is_first_microbatch:
            weight.data.copy_(_quantized(given, meta, WEIGHT, recipe))
        return _Product.apply(x, self.weight, weight, meta, State.is_first_fp8_module())


class Linear(torch.nn.Module, QuantizedProduct):
    """Quantized linear layer that maps ``[4, 6]`` to ``[4, 6]``."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 6, device="cuda") / 2)
        self.set_up()

    def forward(self, x, is_first_microbatch=None):
        if not State.enabled:
            return torch.nn.functional.linear(x, self.weight)
        return self.product(x, is_first_microbatch)


class DotProductAttention(torch.nn.Module):
    """Unquantized attention. Like TransformerEngine's, it has FP8 statistics even if the recipe does not use them."""

    def __init__(self):
        super().__init__()
        self.fp8_meta = _statistics()

    def forward(self, x):
        return x.tanh()


def statistics(modules, recipe):
    if recipe in (None, CURRENT):
        return None
    return [
        {name: tensor.clone() for name, tensor in part.fp8_meta.items() if name in ("scale", "amax")}
        for module in modules
        for part in module.modules()
        if hasattr(part, "fp8_meta")
    ]


def restore(modules, saved):
    if saved is None:
        return
    parts = [part for module in modules for part in module.modules() if hasattr(part, "fp8_meta")]
    for part, values in zip(parts, saved, strict=True):
        for name, value in values.items():
            part.fp8_meta[name].copy_(value)


def _modules() -> dict[str, Any]:
    State.reset()
    root, pytorch, graph = (
        cast("Any", ModuleType("transformer_engine" + rest)) for rest in ("", ".pytorch", ".pytorch.graph")
    )
    graph.FP8GlobalStateManager, graph.autocast = State, autocast
    graph.save_fp8_tensors, graph.restore_fp8_tensors = statistics, restore
    graph.get_default_fp8_recipe = lambda: "default recipe"
    capturing: list[bool] = []
    graph.is_graph_capturing = lambda: bool(capturing)
    graph.set_capture_start, graph.set_capture_end = lambda: capturing.append(True), capturing.clear
    pytorch.graph = graph
    return {module.__name__: module for module in (root, pytorch, graph)}


def installed(monkeypatch) -> ModuleType:
    """Install the emulation and return its ``transformer_engine.pytorch.graph``."""
    modules = _modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return cast(ModuleType, modules["transformer_engine.pytorch.graph"])


class _InMegatron(QuantizedProduct):
    """Mixin that quantizes Megatron's linear layers like TransformerEngine's."""

    config: Any
    is_first_microbatch: bool

    def _forward_impl(self, input, weight, bias=None, **unused):
        if not State.enabled:
            return torch.nn.functional.linear(input, weight, bias)
        is_first = None if self.config.disable_parameter_transpose_cache else self.is_first_microbatch
        output = self.product(input, is_first)
        self.is_first_microbatch = False
        return output if bias is None else output + bias


def quantize_linear_layers(model: torch.nn.Module) -> None:
    """Quantize all linear modules in the transformer layers of ``model``."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    of_layers = [part for name in ("decoder", "mtp") for part in getattr(model, name, torch.nn.Module()).modules()]
    for layer in cast(Any, of_layers):
        if type(layer) in (ColumnParallelLinear, RowParallelLinear):
            kind = type(layer)
            layer.__class__ = type(f"Quantized{kind.__name__}", (_InMegatron, kind), {})
            layer.set_up()
            layer.is_first_microbatch = True


@contextmanager
def in_megatron() -> Iterator[None]:
    """Context manager that makes Megatron use this emulation in place of TransformerEngine's FP8."""
    from megatron.core import fp8_utils, parallel_state, recompute
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401  # checks the version of TransformerEngine
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.transformer import multi_token_prediction, transformer_block

    def recipe(config: Any) -> str:
        return str(config.fp8_recipe)

    def context(config: Any, layer_no: int = -1, is_init: bool = False) -> Any:
        if is_init or not config.fp8 or fp8_utils.is_first_last_bf16_layer(config, layer_no):
            return nullcontext()
        group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
        return autocast(recipe=recipe(config), amax_reduction_group=group)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, _modules()))
        stack.enter_context(mock.patch.object(fp8_utils, "get_fp8_recipe", recipe))
        for module in (fp8_utils, transformer_block, hybrid_block, multi_token_prediction, recompute):
            stack.enter_context(mock.patch.object(module, "get_fp8_context", context))
        yield
