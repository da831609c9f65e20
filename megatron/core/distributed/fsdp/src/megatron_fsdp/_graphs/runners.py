"""The kinds of passes, a class for each: how they deal with the parameters and gradients of a module.

===================  ==============================================================================================
``Eager``            as in megatron-core; of modules with graphs in the order of the replays of other ranks
``Recorded``         recorded with its collectives inside, together with other units
``Captured``         captured by an engine that calls hooks before and after each pass
``Graphed``          a replay: addresses are compared, gradients are handled together
``Planned``          a replay of a unit whose collectives are recorded and planned
===================  ==============================================================================================
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.transformer._cuda_graphs.engine.addresses import AddressGuard

from ..mixed_precision import fp8_create_transpose_cache, fp8_discard_transpose_cache
from ..param_and_grad_buffer import PrefetchOrder
from ..training_state import TrainingState
from .context import Context
from .pipelines import free_gradients, release_gathered_ahead
from .unit import ADVICE, Direction, Unit
from .unit_plan import UnitPlan

_ORDERS = {"forward": PrefetchOrder.FORWARD_PASS_ORDER, "backward": PrefetchOrder.BACKWARD_PASS_ORDER}


class Eager:
    """The ``Runner`` of passes that run eagerly, and what the others have in common."""

    frames_backward = False
    records_reductions = False

    def __init__(self, context: Context, module: torch.nn.Module):
        self.module = module
        self.params: list[torch.nn.Parameter] = []
        self._context, self._fsdp = context, context.fsdp
        self._unit = context.units.get(module)
        self._in_place = self._fsdp.param_and_grad_buffer.unsharded_gradients

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
        params = self._params(direction)
        if not params:
            return
        graphed = self._context.registry.graphed.get(self.module)
        in_training = self._fsdp.training or direction == "backward"
        if prefetch and in_training and graphed is not None and graphed.gather_beside_replays(direction):
            return
        self._gather(params, direction, prefetch)

    def _gather(self, params: list[torch.nn.Parameter], direction: Direction, prefetch: bool) -> None:
        if self._fsdp.dist_index.hsdp_outer_dp_shard and self._context.registry.has_graphs:
            # Other ranks may replay, and gather everything between instances before that.
            self._fsdp.all_gather_pipeline.gather_between_instances()
        self._fsdp.all_gather_and_wait_parameters_ready(
            params, prefetch=prefetch, prefetch_order=_ORDERS[direction], bwd=direction == "backward"
        )
        if self._in_place.fused:
            self._in_place.let_kernels_add(params)

    def release(self, direction: Direction, lazy: bool = False) -> None:
        """Release the bucket of the unit for this direction.

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
        """Drop the FP8 transposes of the unit, unless they are kept, each in one place."""
        if self._unit is not None and not self._fsdp.ddp_config.keep_fp8_transpose_cache:
            for param in self._unit.float8_params:
                fp8_discard_transpose_cache(param)

    def before_backward(self) -> None:
        """Note that the backward pass of the module begins, and gather parameters."""
        backward = self._context.backward
        backward.begin((self.module,), self)
        if self._unit is not None:
            self._unit.set_training_state(TrainingState.PRE_BACKWARD)
            taken = self.params
            if not taken and backward.expects_gradients:  # other ranks may replay, and reduce buckets in their order
                taken = self._context.registry.taken_in_replays(self.module, self._unit.params)
            if taken:  # ``after_backward`` will be called
                backward.takers.update(dict.fromkeys(taken, self))
        else:  # fine-grained hooks are on every module
            for submodule in self.module.modules():
                submodule._training_state = TrainingState.PRE_BACKWARD
        self.gather("backward")

    def after_backward(self) -> None:
        """Handle collected gradients, and release both buckets of the unit."""
        self._handle_collected()
        self.release("backward")
        self.release("forward")
        (self._unit or self._inner_unit()).set_training_state(TrainingState.IDLE)

    def take(self, param: torch.nn.Parameter) -> None:
        """Keep ``param`` until ``after_backward``: handling all gradients of a unit at once saves host time."""
        self._context.backward.collected[self].append(param)

    def _handle_collected(self) -> None:
        collected = self._context.backward.collected.pop(self, None)
        if not collected:
            return
        graphed = self._context.registry.graphed.get(self.module)
        for params in [collected] if graphed is None else graphed.in_order(collected):
            self._context.gradients.handle(params)

    def gather_beside_replays(self, direction: Direction) -> bool:
        return False

    def in_order(self, params: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
        return [params]


class Recorded(Eager):
    """Passes that are recorded together with those of other units, with their collectives.

    Args:
        before: For a direction in which it is the first of those units, what releases them all.

    Attributes:
        plan: Gathers, where that must be otherwise than in eager training; None in graphs of the whole model, beside
            which eager passes gather as ever.
    """

    records_reductions = True

    def __init__(
        self,
        context: Context,
        module: torch.nn.Module,
        plan: UnitPlan | None,
        before: Mapping[Direction, Callable[[], None]],
    ):
        super().__init__(context, module)
        self.plan, self._before = plan, before
        self.params = context.units[module].params

    def gather(self, direction: Direction, prefetch: bool = True) -> None:
        if self.plan is not None and prefetch:
            self.plan.gather(direction)
            if direction == "backward" and self.plan.unit.float8_params:
                fp8_create_transpose_cache(self.plan.unit.float8_params)
            self._in_place.let_kernels_write(self.params)
        else:  # without a prefetch, in a pass that is computed again, no other unit is gathered
            super().gather(direction, prefetch)

    def gather_beside_replays(self, direction: Direction) -> bool:
        if direction in self._before:  # the graphs find all units released, whoever gathered some ahead
            self._before[direction]()
        self.gather(direction)
        return True


@dataclass
class Facts:
    """What a capture has shown of a module.

    Attributes:
        params: Its parameters that are gathered together for its graphs, even if these do not read all of them.
        kept: The buckets that keep their memory as long as there are graphs.
        guards: The addresses of ``params``, for each captured direction.
        written: The parameters whose gradients the backward graph writes to their buckets itself.
        whole: Whether the replay of the backward graph calls what is to run before and after it.
        fused: An ordered set (dict keys) of the parameters whose main gradients fused kernels in the backward graph
            update.
        main_grad_guard: The addresses of these main gradients; None before a backward pass was captured.
    """

    params: list[torch.nn.Parameter]
    kept: frozenset[int] = frozenset()
    guards: dict[Direction, AddressGuard] = field(default_factory=dict)
    written: frozenset[torch.nn.Parameter] = frozenset()
    whole: bool = False
    fused: dict[torch.nn.Parameter, None] = field(default_factory=dict)
    main_grad_guard: AddressGuard | None = None


class Graphed(Eager):
    """Replays of a module without a plan."""

    def __init__(self, context: Context, module: torch.nn.Module, facts: Facts):
        super().__init__(context, module)
        self.facts, self.params = facts, facts.params

    def gather(self, direction: Direction, prefetch: bool = True) -> None:
        """Gather the parameters of the module and of those in it, which do not gather for themselves in a graph.

        Raises:
            MovedBufferError: a parameter is not where the graph reads it.
        """
        self._gather(self.params, direction, prefetch)
        self._check(direction)

    def _check(self, direction: Direction) -> None:
        """Record the addresses of the parameters, or compare them with those that were recorded."""
        guards = self.facts.guards
        if direction in guards:
            guards[direction].check()
            return
        names, params = self._fsdp.param_to_name, self.params
        guards[direction] = AddressGuard(lambda: params, lambda i: f"{names[params[i]]} (in {direction})", ADVICE)

    def before_backward(self) -> None:
        """Gather parameters, and get hold of the main gradients that the graph will write.

        Raises:
            MovedBufferError: a parameter or a main gradient is not where it was at capture.
        """
        super().before_backward()
        self._claim()

    def _claim(self) -> None:
        facts = self.facts
        if facts.fused:
            for param in facts.fused:
                param.main_grad = param.get_main_grad()
            if facts.main_grad_guard is not None:
                facts.main_grad_guard.check()

    def take(self, param: torch.nn.Parameter) -> None:
        """Keep ``param``, and set the flag of the fused kernel if the graph has added its gradient."""
        if param in self.facts.fused:
            param.grad_added_to_main_grad = True
        self._context.backward.collected[self].append(param)


class Planned(Graphed):
    """Replays of a unit with a plan."""

    def __init__(self, context: Context, module: torch.nn.Module, facts: Facts, plan: UnitPlan):
        super().__init__(context, module, facts)
        self.plan = plan
        self.frames_backward = facts.whole

    def gather(self, direction: Direction, prefetch: bool = True) -> None:
        self.plan.gather(direction)
        self._check(direction)

    def _claim(self) -> None:
        self.plan.claim()
        super()._claim()

    def after_backward(self) -> None:
        """Handle the gradients that the graph has not reduced, reduce the others, and release the unit."""
        context, plan = self._context, self.plan
        context.gradients.handle([*context.backward.collected.pop(self, ()), *plan.left])
        plan.reduce(self._fsdp.dist_index.use_hybrid_fsdp and context.gradients.between_instances)
        context.gradients.awaited -= self.facts.written
        self.release("forward")
        plan.unit.set_training_state(TrainingState.IDLE)

    def gather_beside_replays(self, direction: Direction) -> bool:
        self.plan.gather(direction)
        self._in_place.let_kernels_write(self.params)
        return True

    def in_order(self, params: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
        bucket_of = self._fsdp.param_and_grad_buffer.param_to_param_group
        turns = {bucket: turn for turn, each in enumerate(self.plan.reduced, 1) for bucket in each.buckets}
        in_turn: list[list[torch.nn.Parameter]] = [[] for _ in range(len(self.plan.reduced) + 1)]
        for param in params:
            in_turn[turns.get(bucket_of[param], 0)].append(param)
        return in_turn

    def gradients_written(self) -> None:
        """Called when the backward graph has written gradients to their buckets, unless it calls ``after_backward``."""
        for param in self.facts.written:
            param.grad_added_to_main_grad = True


class Captured(Graphed):
    """Passes that an engine captures, with hooks between them. Gradients computed meanwhile are meaningless.

    Args:
        others: The buckets of units that do not run in the capture.

    Attributes:
        sink: What takes gradients in the backward graph; None for autograd.
    """

    def __init__(self, context: Context, module: torch.nn.Module, facts: Facts, others: list[int]):
        super().__init__(context, module, facts)
        self._others = others
        self.sink: Any = None

    def gather(self, direction: Direction, prefetch: bool = True) -> None:
        self._gather(self.params, direction, prefetch)
        release_gathered_ahead(self._fsdp, self._others)
        self._check(direction)

    def _claim(self) -> None:
        self._discard_transposes()  # freed later; the graph makes its own
        if self.sink is not None:  # writes to the buckets; the graph must not allocate them
            for param in self.params:
                if param.requires_grad:
                    param.get_main_grad()

    def take(self, param: torch.nn.Parameter) -> None:
        """Leave the gradient where it is."""

    def after_backward(self) -> None:
        """Release parameters, note fused gradients, and free the gradient buckets."""
        super().after_backward()
        names = self._fsdp.param_to_name
        fused = [param for param in self.params if param.grad_added_to_main_grad]
        for param in fused:
            param.grad_added_to_main_grad = False
        self.facts.fused = dict.fromkeys(fused)
        self.facts.main_grad_guard = AddressGuard(
            lambda: [param.main_grad for param in fused], lambda i: f"the main gradient of {names[fused[i]]}", ADVICE
        )
        bucket_of = self._fsdp.param_and_grad_buffer.param_to_param_group
        free_gradients(self._fsdp, {bucket_of[param] for param in self.module.parameters()})
