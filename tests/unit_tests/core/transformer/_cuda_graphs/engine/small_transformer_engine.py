"""A TransformerEngine in miniature: delayed scaling, cached weights, ``autocast``; the interface and rules of 2.20."""

import sys
from types import ModuleType
from typing import Any, cast

import torch

LEVELS = 1024.0  # values are rounded to so many steps of their scale


class State:
    """What ``FP8GlobalStateManager`` is."""

    enabled = capturing = first = False
    recipe = group = skip = None
    depth = 0
    metas: list[dict[str, Any]] = []
    reductions: list[str] = []

    @classmethod
    def reset(cls) -> None:
        cls.enabled = cls.capturing = cls.first = False
        cls.recipe = cls.group = cls.skip = None
        cls.depth, cls.metas, cls.reductions = 0, [], []

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
        if cls.skip is None:
            cls.skip = torch.zeros(1, device="cuda")
        cls.skip.fill_(skip)

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, meta: dict[str, Any]) -> None:
        if all(meta is not other for other in cls.metas):
            cls.metas.append(meta)

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        cls.reductions.append("forward" if forward else "backward")
        place = 0 if forward else 1
        for meta in cls.metas:
            meta["scale"][place].copy_(LEVELS / meta["amax"][place].clamp(min=1e-6))


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
    """Of the forward pass and of the backward pass."""
    return {"scale": torch.full((2,), 64.0, device="cuda"), "amax": torch.zeros(2, device="cuda")}


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, quantized_weight, meta, reduces):
        meta["amax"][0].copy_(x.abs().max())
        quantized = rounded(x, meta["scale"][0])
        ctx.save_for_backward(quantized, quantized_weight)
        ctx.meta, ctx.reduces = meta, reduces
        return quantized @ quantized_weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.meta["amax"][1].copy_(grad.abs().max())
        quantized = rounded(grad, ctx.meta["scale"][1])
        if ctx.reduces:
            State.reduce_and_update_fp8_tensors(forward=False)
        return quantized @ weight, quantized.t() @ x, None, None, None


class Linear(torch.nn.Module):
    """Takes and returns ``[4, 6]``; multiplies with rounded values."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 6, device="cuda") / 2)
        self.cached = torch.zeros(6, 6, device="cuda")
        self.fp8_meta = _statistics()

    def forward(self, x, is_first_microbatch=None):
        if not State.enabled:
            return torch.nn.functional.linear(x, self.weight)
        weight = rounded(self.weight.detach(), torch.full((), LEVELS, device="cuda"))
        if State.capturing and State.skip is not None:
            weight = self.cached.copy_(torch.where(State.skip.bool(), self.cached, weight))
        elif is_first_microbatch is not None:
            weight = self.cached.copy_(weight) if is_first_microbatch else self.cached
        reduces = not State.capturing and State.is_first_fp8_module()
        if not State.capturing:
            State.add_fp8_tensors_to_global_buffer(self.fp8_meta)
        return _Product.apply(x, self.weight, weight.clone(), self.fp8_meta, reduces)


class DotProductAttention(torch.nn.Module):
    """Holds statistics of its own, which count only if the recipe quantizes attention."""

    def __init__(self):
        super().__init__()
        self.fp8_meta = _statistics()

    def forward(self, x):
        return x.tanh()


class Operation(torch.nn.Module):
    """An operation with statistics for each direction."""

    def __init__(self):
        super().__init__()
        self._fp8_metas = {mode: _statistics() for mode in ("forward", "backward")}

    def num_quantizers(self, mode):
        return 1 if mode == "forward" else 0

    def forward(self, x):
        return x * 2


class Fused(torch.nn.Module):
    """Runs its operation without calling it."""

    def __init__(self):
        super().__init__()
        self.operation = Operation()
        self._module_groups = None

    def forward(self, x):
        return x * 2


def statistics(modules, recipe):
    if recipe is None:
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


def installed(monkeypatch) -> ModuleType:
    """Put this in TransformerEngine's place; returns what stands for ``transformer_engine.pytorch.graph``."""
    State.reset()
    root, pytorch, graph = (
        cast("Any", ModuleType("transformer_engine" + rest)) for rest in ("", ".pytorch", ".pytorch.graph")
    )
    graph.FP8GlobalStateManager, graph.autocast = State, autocast
    graph.save_fp8_tensors, graph.restore_fp8_tensors = statistics, restore
    graph.get_default_fp8_recipe = lambda: "default recipe"
    graph.is_graph_capturing = lambda: False
    graph.set_capture_start = graph.set_capture_end = lambda: None
    pytorch.graph = graph
    for module in (root, pytorch, graph):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return graph
