"""Define runners, which gather and release the parameters of one module and collect its gradients.

``EagerRunner`` works like megatron-core, even while whole passes are recorded. ``ReplayedRunner`` is for modules with
their own graphs, including during capture. The forward pass stores its runner in autograd's graph for the backward
pass.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.transformer._cuda_graphs.engine.captured import GraphOwner
from megatron.core.transformer._cuda_graphs.snapshot import Snapshot, addresses

from ..mixed_precision import fp8_discard_transpose_cache, is_float8tensor
from ..param_and_grad_buffer import TO_GATHER, PrefetchOrder
from .collectives import RecordedReduction
from .pipelines import (
    ADVICE,
    Direction,
    TrainingState,
    free_gradients,
    release_all,
    set_training_state,
    shown_in_profiles,
)

_ORDERS: dict[Direction, PrefetchOrder] = {
    "forward": PrefetchOrder.FORWARD_PASS_ORDER,
    "backward": PrefetchOrder.BACKWARD_PASS_ORDER,
}


class EagerRunner:
    """Runs a module's eager passes.

    Args:
        graphs: The ``FsdpGraphs`` that owns this runner.
        module: The module, which must have raw parameters.

    Attributes:
        is_unit: Whether the module is an FSDP unit, whose parameters are gathered and released together.
        params: The raw parameters of the module and its submodules.
        buckets: The bucket indices of ``params``.
        float8_params: The FP8 tensors in ``params``.
        submodules: The module itself and all modules below it.
        frames_backward: Whether replays, instead of autograd, call ``before_backward`` and ``after_backward``.
    """

    frames_backward = False

    def __init__(self, graphs: Any, module: torch.nn.Module):
        self._graphs, self._fsdp, self._backward = graphs, graphs.fsdp, graphs.backward
        self.module, self.submodules = module, list(module.modules())
        self.module_names = self._backward.module_names  # for profiles
        fsdp, buffer = self._fsdp, self._fsdp.param_and_grad_buffer
        units = tuple(fsdp.fsdp_unit_modules)
        self.is_unit = isinstance(module, units)
        self.params = list(module.parameters())
        self.float8_params = [param for param in self.params if is_float8tensor(param)]
        self._bucket_of = buffer.param_to_param_group
        self.buckets = sorted({self._bucket_of[param] for param in self.params if param in self._bucket_of})
        self._in_place = buffer.unsharded_gradients
        by_children = fsdp.fine_grained_recurse_module_types  # these gather for their submodules
        self._gathered: dict[Direction, list[torch.nn.Parameter]] = {}
        for direction, fine_grained in zip(
            _ORDERS,
            (fsdp.enable_fine_grained_param_gather_hook, fsdp.enable_fine_grained_param_gather_backward_hook),
            strict=True,
        ):
            recurse = isinstance(module, by_children if fine_grained else units)
            self._gathered[direction] = list(module.parameters(recurse=recurse))

    def gather(self, direction: Direction, prefetch: bool = True) -> None:
        """Gather the parameters and wait for them; optionally prefetch the next units' parameters."""
        if params := self._gathered[direction]:
            self._gather(params, direction, prefetch)

    def _gather(self, params: list[torch.nn.Parameter], direction: Direction, prefetch: bool) -> None:
        if self._fsdp.dist_index.hsdp_outer_dp_shard and self._graphs.has_graphs:
            # Ranks that replay begin by gathering everything across HSDP replicas.
            self._fsdp.all_gather_pipeline.gather_across_replicas()
        self._fsdp.all_gather_and_wait_parameters_ready(
            params, prefetch=prefetch, prefetch_order=_ORDERS[direction], bwd=direction == "backward"
        )
        if self._in_place.fused:
            self._in_place.let_kernels_add(params)

    def release(self, direction: Direction, lazy: bool = False) -> None:
        """Release the unit's buckets for this direction; ``lazy`` defers this until a gather needs the memory.

        Raises:
            TypeError: The module is not an FSDP unit.
        """
        if not self.is_unit:
            raise TypeError(
                f"cannot release {type(self.module).__name__}, which is not an FSDP unit: release only FSDP units"
            )
        for bucket in self.buckets:
            self._fsdp.all_gather_pipeline.release_bucket(bucket, direction == "backward", lazy=lazy)
        self._discard_transposes()

    def _discard_transposes(self) -> None:
        """Discard the FP8 transposes of the parameters, unless ``keep_fp8_transpose_cache`` is set."""
        if self.float8_params and not self._fsdp.ddp_config.keep_fp8_transpose_cache:
            for param in self.float8_params:
                fp8_discard_transpose_cache(param)

    def _collected(self) -> Sequence[torch.nn.Parameter]:
        """Return the parameters whose gradients are queued until ``after_backward``.

        Other gradients are accumulated immediately. Eager passes queue gradients only if the module has graphs, to
        reduce them in the same order as replays on other ranks.
        """
        return self.params if self._backward.expects_gradients and self._graphs.hold(self.module) else ()

    def before_backward(self) -> None:
        """Record that the module's backward pass begins, and gather its parameters."""
        self._backward.begin((self.module,), self)
        set_training_state(self.submodules, TrainingState.PRE_BACKWARD)
        self._backward.takers.update(dict.fromkeys(self._collected(), self))
        self.gather("backward")

    def after_backward(self) -> None:
        """Accumulate and reduce collected gradients, and release the unit's buckets for both directions."""
        collected = self._backward.collected.pop(self, None)
        if collected:
            self._graphs.gradients.handle(collected)
        self.release("backward")
        self.release("forward")
        set_training_state(self.submodules, TrainingState.IDLE)

    def collect(self, param: torch.nn.Parameter) -> None:
        """Queue ``param``, whose gradient is complete, for ``after_backward``."""
        self._backward.collected[self].append(param)


class ReplayedRunner(EagerRunner, GraphOwner):
    """Runs a module's replays and its capture, and owns the graphs of the whole module.

    Gradients computed during capture are meaningless.
    """

    def __init__(self, graphs: Any, module: torch.nn.Module):
        super().__init__(graphs, module)
        self._weights: Snapshot | None = None
        self._fused: dict[torch.nn.Parameter, None] = {}  # fused kernels in the graph update their main gradients
        self._main_grads = Snapshot(ADVICE)  # for ``_fused``
        self._written: dict[int, dict[Any, None]] = {}  # parameters whose gradients the graph writes, by bucket
        self._claimed: list[RecordedReduction] = []
        self._ahead: dict[Direction, list[int]] = {}  # buckets in megatron-core's order, if gathers are recorded

    def gather(self, direction: Direction, prefetch: bool = True) -> None:
        """Gather the parameters of the module and its submodules, because a replay does not run their hooks.

        Raises:
            ChangedSinceCaptureError: The address of a parameter changed since capture.
        """
        if prefetch and direction in self._ahead:
            self._replay_gathers(direction)
        else:
            self._gather(self.params, direction, prefetch and self._graphs.captured is None)
        if self._weights is None:
            names = [self._fsdp.param_to_name[param] for param in self.params]
            self._weights = Snapshot(ADVICE, addresses(names, self.params))
        self._weights.check()

    def _replay_gathers(self, direction: Direction) -> None:
        """Gather the same buckets as megatron-core, with recorded all-gathers where possible."""
        gathers = self._fsdp.all_gather_pipeline
        if self._fsdp.dist_index.hsdp_outer_dp_shard:
            gathers.gather_across_replicas()
        for bucket in self.buckets:
            gathers.bucket_can_be_released[bucket, False] = False
        for bucket in self._ahead[direction]:
            gathers.start_gather(bucket)
        for bucket in self.buckets:
            gathers.wait_bucket_ready(bucket, False)

    def select_collectives(self) -> None:
        """Select the recorded collectives to replay, with all-gathers in the order in which megatron-core starts them.

        Call this while no bucket is gathered. It gathers buckets temporarily.
        """
        for direction in _ORDERS:
            self._gather(self.params, direction, prefetch=True)
            status = self._fsdp.all_gather_pipeline.bucket_status.items()
            self._ahead[direction] = [bucket for (bucket, _), each in status if each not in TO_GATHER]
            release_all(self._fsdp)
        recorded = self._fsdp.grad_reduce_pipeline.recorded.values()
        self._claimed = [each for each in recorded if not self._written.keys().isdisjoint(each.buckets)]

    def _collected(self) -> Sequence[torch.nn.Parameter]:
        return self.params

    @shown_in_profiles
    def before_backward(self) -> None:
        """Gather parameters, and make the gradient buckets that the graph writes available.

        Raises:
            ChangedSinceCaptureError: The address of a parameter or gradient changed since capture.
        """
        super().before_backward()
        if self._graphs.captured is not None:
            self._discard_transposes()  # freed later; the graph creates its own
            for param in self.params:
                if param.requires_grad:
                    param.get_main_grad()  # otherwise the graph would allocate the bucket
            return
        for reduction in self._claimed:
            reduction.claim()
        for param in self._fused:
            param.main_grad = param.get_main_grad()
        if self._fused:
            self._main_grads.check()

    def collect(self, param: torch.nn.Parameter) -> None:
        """Queue ``param`` for ``after_backward``; do nothing during capture.

        If fused kernels in the graph have added its gradient, set ``grad_added_to_main_grad``.
        """
        if self._graphs.captured is None:
            if param in self._fused:
                param.grad_added_to_main_grad = True
            super().collect(param)

    def consume_gradients(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Move ``grads`` to their buckets as part of the backward graph, and return the gradients left to autograd."""
        taken: list[Any] = []
        left: list[torch.Tensor | None] = []
        for param, grad in zip(params, grads, strict=True):
            delayed, shared = (getattr(param, mark, False) for mark in ("skip_backward_post_hook", "_is_shared"))
            if delayed or shared or (grad is None and not self.frames_backward):
                left.append(grad)
                continue
            left.append(None)
            param.grad = grad  # None, for an unused parameter, is treated as zeros
            taken.append(param)
        with torch.no_grad():
            self._graphs.gradients.accumulate(taken)
        for param in taken:
            self._written.setdefault(self._bucket_of[param], {})[param] = None
        return left

    def gradients_written(self) -> None:
        """Mark gradients written by the graph as complete; queue one parameter per bucket to trigger its reduction."""
        ready = self._fsdp.grad_reduce_pipeline.bucket_grad_ready_params
        for bucket, params in self._written.items():
            one, *others = params  # handling the last of these parameters reduces the bucket
            ready[bucket].update(others)
            self._graphs.gradients.awaited.difference_update(params)
            one.grad_added_to_main_grad = True
            self._backward.collected[self].append(one)

    @shown_in_profiles
    def after_backward(self) -> None:
        """Reduce gradients and release parameters.

        During capture, record which gradients fused kernels have added, and free the gradient buckets.
        """
        if self._graphs.captured is None and self.frames_backward:
            self.gradients_written()
        super().after_backward()
        if self._graphs.captured is not None:
            fused = [param for param in self.params if param.grad_added_to_main_grad]
            for param in fused:
                param.grad_added_to_main_grad = False
            self._fused = dict.fromkeys(fused)
            names = [f"the main gradient of {self._fsdp.param_to_name[param]}" for param in fused]
            self._main_grads = Snapshot(ADVICE, addresses(names, lambda: [param.main_grad for param in fused]))
            free_gradients(self._fsdp, self.buckets)


class PartOfModule(GraphOwner):
    """Owns graphs of a part of a module; autograd calls the hooks around the module's backward pass."""

    def __init__(self, runner: ReplayedRunner):
        self.consume_gradients = runner.consume_gradients  # type: ignore[method-assign]
        self.after_backward = runner.gradients_written  # type: ignore[method-assign]
