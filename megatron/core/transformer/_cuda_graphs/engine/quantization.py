"""Support TransformerEngine's quantized layers (FP8, FP4) in CUDA graphs.

Some work cannot be recorded and runs on the host. A capture enters TransformerEngine's ``autocast``. A replay registers
the statistics of delayed scaling, reduces them after the first module's backward pass, and sets the flag for cached
quantized weights. The protocol follows ``make_graphed_callables`` of TransformerEngine 2.20.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch

from ..replacements import between, replaced_attribute
from .graph import preserve_tensors


def transformer_engine_flag() -> AbstractContextManager[None]:
    """Return a context that sets TransformerEngine's capture flag for its modules, if TransformerEngine is loaded."""
    graph = sys.modules.get("transformer_engine.pytorch.graph")
    if graph is None or graph.is_graph_capturing():
        return nullcontext()
    return between(graph.set_capture_start, graph.set_capture_end)


def resolve_quantization(
    callables: Sequence[Callable],
    *,
    enabled: Any,
    calibrating: bool | None,
    recipe: Any,
    amax_reduction_group: Any,
    cache_quantized_params: bool | None,
) -> "list[Quantization] | list[None]":
    """Return the quantization of each callable from the arguments of ``make_graphed_callables``.

    Raises:
        ValueError: ``enabled`` has the wrong length.
        TypeError: ``enabled`` is neither a bool nor a sequence of bools, or is True for a function.
        RuntimeError: TransformerEngine is needed and cannot be imported.
    """
    given = enabled
    if enabled is None or isinstance(enabled, bool):
        enabled = (bool(enabled),) * len(callables)
    if not isinstance(enabled, Sequence) or not all(isinstance(value, bool) for value in enabled):
        raise TypeError(f"enabled must be a bool or a tuple with one bool per callable, got {enabled!r}")
    if len(enabled) != len(callables):
        raise ValueError(f"enabled must have one entry for each of {len(callables)} callables, got {len(enabled)}")
    for index, (quantized, func) in enumerate(zip(enabled, callables, strict=True)):
        if quantized and not isinstance(func, torch.nn.Module):
            raise TypeError(
                f"only modules can be quantized, but callable {index} is {func}: set enabled[{index}] to False"
            )
    if not any(enabled) and not calibrating:
        return [None] * len(callables)
    try:
        from transformer_engine.pytorch import graph
    except Exception as error:  # a wheel without a CUDA driver fails in many ways
        wanted = f"enabled={given!r}" if any(enabled) else f"calibrating={calibrating!r}"
        raise RuntimeError(
            f"{wanted} needs TransformerEngine, which cannot be imported ({error}): install it, or train without FP8 "
            "and FP4"
        ) from error
    recipe = (recipe or graph.get_default_fp8_recipe()) if any(enabled) else None
    return [
        Quantization(
            graph,
            enabled=quantized,
            calibrating=bool(calibrating),
            recipe=recipe,
            amax_reduction_group=amax_reduction_group,
            caches_params=bool(cache_quantized_params),
        )
        for quantized in enabled
    ]


@dataclass(eq=False)
class Quantization:
    """Quantization settings of a callable, and the host-side work around its replays.

    Attributes:
        graph: The module ``transformer_engine.pytorch.graph``.
        recipe: TransformerEngine's recipe; None if no callable of the capture is quantized.
        amax_reduction_group: Process group for amax reduction.
        caches_params: Whether weights are quantized only in the first micro-batch of a step.
        enabled: Whether the callable is quantized.
        calibrating: Whether a callable that is not quantized collects statistics.
    """

    graph: Any
    _: KW_ONLY
    recipe: Any
    amax_reduction_group: Any
    caches_params: bool
    enabled: bool = True
    calibrating: bool = False
    # Modules with statistics that ran in warm-up or capture; used as ordered sets.
    _modules: dict[Any, None] = field(default_factory=dict, init=False)
    _attention: dict[Any, None] = field(default_factory=dict, init=False)
    _operations: dict[Any, None] = field(default_factory=dict, init=False)

    @property
    def state(self) -> Any:
        """TransformerEngine's global FP8 and FP4 state."""
        return self.graph.FP8GlobalStateManager

    def context(self) -> AbstractContextManager:
        """Return the ``autocast`` context for warm-up and capture. It does not update statistics, but replays do."""
        return self.graph.autocast(
            enabled=self.enabled,
            calibrating=self.calibrating,
            recipe=self.recipe,
            amax_reduction_group=self.amax_reduction_group,
            _graph=True,
        )

    @contextmanager
    def preserve_statistics(self, callables: Iterable[Any]) -> Iterator[None]:
        """Context manager that restores the delayed-scaling statistics of ``callables`` on exit."""
        modules = [module for module in callables if isinstance(module, torch.nn.Module)]
        if self.caches_params:
            self.state.set_skip_fp8_weight_update_tensor(False)
        statistics = self.graph.save_fp8_tensors(modules, recipe=self.recipe)
        try:
            yield
        finally:
            self.graph.restore_fp8_tensors(modules, statistics)

    def note(self, ran: Iterable[torch.nn.Module]) -> None:
        """Add modules that ran in the callable; replays register the statistics of these modules."""
        for module in ran:
            if hasattr(module, "fp8_meta"):
                is_attention = any(kind.__name__ == "DotProductAttention" for kind in type(module).__mro__)
                (self._attention if is_attention else self._modules)[module] = None
            elif hasattr(module, "_fp8_metas"):
                self._operations[module] = None

    def before_forward(self, is_first_microbatch: Any) -> Callable[[], None] | None:
        """Register statistics and set the flag for cached weights, before a replay of the forward graph.

        Args:
            is_first_microbatch: Whether to requantize cached weights.

        Returns:
            The function to call after the backward replay to update statistics; None if another module has already run
            in TransformerEngine's outermost ``autocast`` context.

        Raises:
            ValueError: Weights are cached and ``is_first_microbatch`` is not a bool.
        """
        if not self.enabled:
            return None
        if self.caches_params and not isinstance(is_first_microbatch, bool):
            raise ValueError(
                "graphs captured with cache_quantized_params need is_first_microbatch=True or False in every replay, "
                f"got {is_first_microbatch!r}"
            )
        state = self.state
        if state.is_fp8_enabled():
            recipe, group = state.get_fp8_recipe(), state.get_fp8_group()
            metas = [module.fp8_meta for module in self._modules]
            if getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False):
                metas += [module.fp8_meta for module in self._attention]
            for operation in self._operations:
                metas += [operation._fp8_metas[m] for m in ("forward", "backward") if operation.num_quantizers(m)]
            for meta in metas:
                meta["fp8_group"], meta["recipe"] = group, recipe
                state.add_fp8_tensors_to_global_buffer(meta)
        is_first = state.is_first_fp8_module()
        if is_first and self.caches_params:
            state.set_skip_fp8_weight_update_tensor(not is_first_microbatch)
        # Reduces the amaxes of gradients and updates the scales.
        return partial(state.reduce_and_update_fp8_tensors, forward=False) if is_first else None


class RecordedQuantization:
    """FP8 quantization in graphs of whole passes. The graphs also update amax histories and scales.

    Before a replay, the host only sets a flag on the device: whether to requantize the weights.

    Args:
        manager: TransformerEngine's ``FP8GlobalStateManager``.
        module: The module whose passes are captured.
        delayed: Whether the recipe is delayed scaling, the only recipe with statistics.
        caches_params: Whether weights are quantized only in the first micro-batch of a step.
    """

    def __init__(self, manager: Any, module: torch.nn.Module, delayed: bool, caches_params: bool):
        self._manager, self._delayed = manager, delayed
        self._modules = [each for each in module.modules() if hasattr(each, "reset_fp8_meta_tensors")]
        self._cached = [each for each in module.modules() if hasattr(each, "is_first_microbatch")]
        # Read by the graphs: nonzero to reuse the quantized weights; None if weights are not cached.
        self._skips_weights = torch.zeros(1, device="cuda") if caches_params else None
        self._skips = False  # value of the flag

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Context manager that restores the statistics and ``is_first_microbatch`` flags of modules on exit."""
        state = self._manager.quantization_state
        stashed = {id(queue): list(queue) for queue in state.fp8_tensors_recompute_buffer}

        def unstash() -> None:
            # Otherwise the next recomputation would consume FP8 tensors that a failed capture left in the queues.
            for queue in state.fp8_tensors_recompute_buffer:
                queue.clear()
                queue.extend(stashed.get(id(queue), ()))

        with ExitStack() as stack:
            stack.callback(unstash)
            for module in self._cached:
                stack.callback(module.__dict__.__setitem__, "is_first_microbatch", module.is_first_microbatch)
            if self._delayed:
                buffers = state.global_amax_history_buffer, state.global_scale_buffer
                statistics = chain.from_iterable(each for buffer in buffers for each in buffer.values())
                stack.enter_context(preserve_tensors(statistics))
                # Modules that have not run yet register statistics in warm-up, possibly loaded from a checkpoint.
                for module in self._modules:
                    stack.callback(module.reset_fp8_meta_tensors, module.get_fp8_meta_tensors())
            yield

    def context(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass, in which a GPU tensor decides whether to requantize the weights."""
        state = self._manager.quantization_state
        return replaced_attribute([state], "skip_fp8_weight_update_tensor", lambda flag: self._skips_weights)

    def before_forward(self, is_first_microbatch: object = None) -> None:
        """Make the graphs requantize weights if the modules' ``is_first_microbatch`` is set, and clear it.

        The argument is ignored; it matches ``Quantization.before_forward``.
        """
        if self._skips_weights is None or not self._cached:
            return
        is_first = bool(self._cached[0].is_first_microbatch)
        if self._skips == is_first:
            self._skips = not is_first
            self._skips_weights.fill_(self._skips)
        if is_first:
            for module in self._cached:
                module.__dict__["is_first_microbatch"] = False  # bypasses Module.__setattr__, which is slow

    def tensors(self) -> list[list[Any]]:
        """Return the tensors that the graphs use: amax histories, scales, and each module's quantized weights."""
        state = self._manager.quantization_state
        buffers = state.global_amax_history_buffer, state.global_scale_buffer
        weights = [getattr(module, "_fp8_workspaces", {}) for module in self._cached]
        return [*(list(chain.from_iterable(each.values())) for each in buffers), *map(list, map(dict.values, weights))]
