"""How one pass of a module gathers and releases parameters, and handles gradients.

``Eager`` does it as megatron-core does, also while whole passes are recorded. ``Replayed`` does it for the graphs of
one module, and while these are captured. Whoever runs a pass forward writes its runner into autograd's graph.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.transformer._cuda_graphs.engine.captured import GraphOwner
from megatron.core.transformer._cuda_graphs.snapshot import Snapshot, addresses

from ..mixed_precision import fp8_discard_transpose_cache
from ..param_and_grad_buffer import PrefetchOrder
from .collectives import TO_GATHER, RecordedReduction
from .pipelines import free_gradients, release_all
from .unit import ADVICE, Direction, TrainingState, Unit, shown_in_profiles

_ORDERS: dict[Direction, PrefetchOrder] = {
    "forward": PrefetchOrder.FORWARD_PASS_ORDER,
    "backward": PrefetchOrder.BACKWARD_PASS_ORDER,
}


class Eager:
    """The runner of a module's eager passes.

    Args:
        graphs: The ``FsdpGraphs`` that owns it.

    Attributes:
        frames_backward: Whether replays of the backward graph call ``before_backward`` and ``after_backward``;
            otherwise autograd does.
    """

    frames_backward = False

    def __init__(self, graphs: Any, module: torch.nn.Module):
        self.module = module
        self._graphs, self._fsdp, self._backward = graphs, graphs.fsdp, graphs.backward
        self._unit = graphs.units.get(module)
        self._in_place = self._fsdp.param_and_grad_buffer.unsharded_gradients
        self.module_names = self._backward.module_names  # for profiles

    def _params(self, direction: Direction) -> list[torch.nn.Parameter]:
        fsdp = self._fsdp
        fine_grained = (
            fsdp.enable_fine_grained_param_gather_hook
            if direction == "forward"
            else fsdp.enable_fine_grained_param_gather_backward_hook
        )
        if self._unit is not None and not fine_grained:
            return self._unit.params
        whole = fine_grained and isinstance(self.module, fsdp.fine_grained_recurse_module_types)
        return list(self.module.parameters(recurse=whole))

    def gather(self, direction: Direction, prefetch: bool = True) -> None:
        """Gather the parameters, wait for them, and ``prefetch`` those of the units after the module."""
        params = self._params(direction)
        if not params:
            return
        passes = self._graphs.passes if prefetch and self._unit is not None else None
        if passes is None or self._graphs.captured is not None or not (self._fsdp.training or direction == "backward"):
            self._gather(params, direction, prefetch)
        else:
            with passes.gathering(self.module, direction):
                self._gather(params, direction, prefetch)

    def _gather(self, params: list[torch.nn.Parameter], direction: Direction, prefetch: bool) -> None:
        if self._fsdp.dist_index.hsdp_outer_dp_shard and self._graphs.has_graphs:
            # Other ranks may replay, and gather everything between instances before that.
            self._fsdp.all_gather_pipeline.gather_between_instances()
        self._fsdp.all_gather_and_wait_parameters_ready(
            params, prefetch=prefetch, prefetch_order=_ORDERS[direction], bwd=direction == "backward"
        )
        if self._in_place.fused:
            self._in_place.let_kernels_add(params)

    def release(self, direction: Direction, lazy: bool = False) -> None:
        """Release the unit's buckets for this direction; ``lazy`` leaves it to the next gather that needs the memory.

        Raises:
            TypeError: the module is not an FSDP unit.
        """
        unit, gathers = self._unit or self._inner_unit(), self._fsdp.all_gather_pipeline
        for bucket in unit.buckets:
            gathers.release_bucket(bucket, direction == "backward", lazy=lazy)
        if unit.float8_params:
            self._discard_transposes()

    def _inner_unit(self) -> Unit:
        """Return the unit of a module inside of another unit, which a schedule releases by itself."""
        if not isinstance(self.module, tuple(self._fsdp.fsdp_unit_modules)):
            raise TypeError(f"{type(self.module).__name__} is not an FSDP unit: others may still use its parameters")
        self._unit = Unit.of(self.module, self._fsdp.param_and_grad_buffer.param_to_param_group)
        return self._unit

    def _discard_transposes(self) -> None:
        """Drop the unit's FP8 transposes, unless they are kept."""
        if self._unit is not None and not self._fsdp.ddp_config.keep_fp8_transpose_cache:
            for param in self._unit.float8_params:
                fp8_discard_transpose_cache(param)

    def _collected(self) -> Sequence[torch.nn.Parameter]:
        """Return the parameters of the unit whose gradients are handled together in ``after_backward``.

        Eager passes do so beside graphs only: other ranks may replay, and reduce in that order.
        """
        beside_replays = self._backward.expects_gradients and self._graphs.hold(self.module)
        return self._unit.params if beside_replays and self._unit is not None else ()

    def before_backward(self) -> None:
        """Note that the module's backward pass begins, and gather parameters."""
        self._backward.begin((self.module,), self)
        if self._unit is not None:
            self._unit.set_training_state(TrainingState.PRE_BACKWARD)
            self._backward.takers.update(dict.fromkeys(self._collected(), self))
        else:  # fine-grained hooks are on every module
            for submodule in self.module.modules():
                submodule.__dict__["_training_state"] = TrainingState.PRE_BACKWARD
        self.gather("backward")

    def after_backward(self) -> None:
        """Handle collected gradients, and release the unit's buckets for both directions."""
        collected = self._backward.collected.pop(self, None)
        if collected:
            self._graphs.gradients.handle(collected)
        self.release("backward")
        self.release("forward")
        (self._unit or self._inner_unit()).set_training_state(TrainingState.IDLE)

    def collect(self, param: torch.nn.Parameter) -> None:
        """Keep ``param``, whose gradient is complete, until ``after_backward``."""
        self._backward.collected[self].append(param)


class Replayed(Eager, GraphOwner):
    """The runner of a module's replays, and of its capture by an engine that calls hooks around each pass.

    It owns graphs that hold the whole module. Gradients computed at capture are meaningless.

    Args:
        reads_experts: Whether the graphs may read experts, and buckets come and go. Otherwise the buckets of all other
            parameters keep their memory as long as there are graphs.

    Attributes:
        params: The parameters that are gathered for the graphs, even if these do not read all of them.
        kept: The buckets that keep their memory.
        takes_gradients: Whether the backward graph writes gradients to their buckets.
    """

    def __init__(self, graphs: Any, module: torch.nn.Module, reads_experts: bool):
        super().__init__(graphs, module)
        self.params, self.kept = list(module.parameters()), frozenset[int]()
        self.takes_gradients = False
        buffer = self._fsdp.param_and_grad_buffer
        self._bucket_of = buffer.param_to_param_group
        if not reads_experts and self._unit is not None and graphs.shards_params:
            self.params = [p for p in self.params if not buffer.parameter_groups[self._bucket_of[p]].is_expert_param]
            self.kept = frozenset(self._bucket_of[param] for param in self.params)
        self._own = sorted({self._bucket_of[param] for param in self.params})
        self._guards: dict[Direction, Snapshot] = {}
        self._fused: dict[torch.nn.Parameter, None] = {}  # whose main gradients fused kernels in the graph update
        self._main_grads: Snapshot | None = None  # theirs
        self._written: dict[int, dict[Any, None]] = {}  # by bucket the parameters whose gradients the graph writes
        self._claimed: list[RecordedReduction] = []
        self._ahead: dict[Direction, list[int]] = {}  # buckets in megatron-core's order, if gathers are recorded

    # ---------------------------------------------------------------------------------------------------- parameters

    def gather(self, direction: Direction, prefetch: bool = True) -> None:
        """Gather the parameters of the module and of those in it, whose hooks no graph calls.

        Raises:
            ChangedSinceCaptureError: a parameter is not where the graph reads it.
        """
        if prefetch and direction in self._ahead:
            self._replay_gathers(direction)
        else:
            self._gather(self.params, direction, prefetch and self._graphs.captured is None)
        guard = self._guards.get(direction)
        if guard is not None:
            guard.check()
        else:
            names = [f"{self._fsdp.param_to_name[param]} (in {direction})" for param in self.params]
            self._guards[direction] = Snapshot(ADVICE, addresses(names, self.params))

    def _replay_gathers(self, direction: Direction) -> None:
        """Gather what megatron-core would, by recorded all-gathers where these can be replayed."""
        gathers, buffer = self._fsdp.all_gather_pipeline, self._fsdp.param_and_grad_buffer
        if self._fsdp.dist_index.hsdp_outer_dp_shard:
            gathers.gather_between_instances()
        for bucket in self._own:
            gathers.bucket_can_be_released[bucket, False] = False
        for bucket in self._ahead[direction]:
            if gathers.bucket_status[bucket, False] in TO_GATHER:
                recorded = gathers.recorded.get(bucket)
                if recorded is None or not recorded.launch():
                    group = buffer.bucket_to_bucket_group[bucket]
                    gathers.all_gather_params(
                        [param for each in group for param in buffer.parameter_groups[each].params]
                    )
        for bucket in self._own:
            gathers.wait_bucket_ready(bucket, False)

    def follow_hooks(self) -> None:
        """Prepare replays of what is recorded for the unit: all-gathers in the order of megatron-core's own hook.

        Nothing is gathered, before and after.
        """
        for direction in _ORDERS:
            self._gather(self.params, direction, prefetch=True)
            status = self._fsdp.all_gather_pipeline.bucket_status.items()
            self._ahead[direction] = [bucket for (bucket, _), each in status if each not in TO_GATHER]
            release_all(self._fsdp)
        recorded = self._fsdp.grad_reduce_pipeline.recorded.values()
        self._claimed = [each for each in recorded if not self._written.keys().isdisjoint(each.buckets)]

    # ----------------------------------------------------------------------------------------------------- gradients

    def _collected(self) -> Sequence[torch.nn.Parameter]:
        return self.params

    @shown_in_profiles
    def before_backward(self) -> None:
        """Gather parameters, and claim the gradients that the graph will write.

        Raises:
            ChangedSinceCaptureError: a parameter or a gradient is not where it was at capture.
        """
        super().before_backward()
        if self._graphs.captured is not None:
            self._discard_transposes()  # freed later; the graph makes its own
            if self.takes_gradients:  # the graph must not allocate the buckets
                for param in self.params:
                    if param.requires_grad:
                        param.get_main_grad()
            return
        for reduction in self._claimed:
            reduction.claim()
        for param in self._fused:
            param.main_grad = param.get_main_grad()
        if self._fused and self._main_grads is not None:
            self._main_grads.check()

    def collect(self, param: torch.nn.Parameter) -> None:
        """Keep ``param``, whose gradient the graph may have added already; leave it where it is at capture."""
        if self._graphs.captured is None:
            if param in self._fused:
                param.grad_added_to_main_grad = True
            super().collect(param)

    def take(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Move ``grads`` to their buckets, as a part of the backward graph; return those that others complete."""
        taken: list[Any] = []
        left: list[torch.Tensor | None] = []
        for param, grad in zip(params, grads, strict=True):
            if completed_elsewhere(param) or (grad is None and not self.frames_backward):
                left.append(grad)
                continue
            left.append(None)
            param.grad = grad  # None, of a parameter that is not used, counts as zeros
            taken.append(param)
        with torch.no_grad():
            self._graphs.gradients.accumulate(taken)
        for param in taken:
            self._written.setdefault(self._bucket_of[param], {})[param] = None
        return left

    def gradients_written(self) -> None:
        """Note that the backward graph has written gradients: of each bucket one is handled for all."""
        ready = self._fsdp.grad_reduce_pipeline.bucket_grad_ready_params
        for bucket, params in self._written.items():
            one, *others = params  # with the last of these parameters the bucket is reduced
            ready[bucket].update(others)
            self._graphs.gradients.awaited.difference_update(params)
            one.grad_added_to_main_grad = True
            self._backward.collected[self].append(one)

    @shown_in_profiles
    def after_backward(self) -> None:
        """Reduce gradients, and release parameters; note fused gradients at capture, and free the gradient buckets."""
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
            free_gradients(self._fsdp, {self._bucket_of[param] for param in self.module.parameters()})


class PartOfModule(GraphOwner):
    """Owns graphs that hold a part of a module, whose backward pass autograd frames."""

    def __init__(self, runner: Replayed):
        self._runner = runner

    def take(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        return self._runner.take(params, grads)

    def after_backward(self) -> None:
        self._runner.gradients_written()


def completed_elsewhere(param: torch.Tensor) -> bool:
    """Whether a delayed pass, or another module that shares the parameter, completes the gradient."""
    return getattr(param, "skip_backward_post_hook", False) or getattr(param, "_is_shared", False)
