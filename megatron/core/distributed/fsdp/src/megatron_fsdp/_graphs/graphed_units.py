"""Megatron-FSDP's state for units that run as CUDA graphs.

A graph reads parameters, and with fused weight gradients writes gradients, at the addresses they had at capture.
``GraphedUnits`` checks these addresses before a replay: a buffer that has moved raises an error that names the
parameter, instead of an illegal memory access.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import torch

from megatron.core.transformer._cuda_graphs.engine.addresses import AddressGuard, MovedBufferError

from .dropped_collectives import drop_collectives, take_back_unlaunched
from .unit import ADVICE, Unit
from .unit_plan import Direction, GroupGather, UnitPlan, UnitPlans

__all__ = ["ADVICE", "GraphedUnit", "GraphedUnits", "MovedBufferError"]


@dataclass
class GraphedUnit:
    """One module that runs as CUDA graphs.

    Attributes:
        params: Its parameters that are gathered together for its graphs, even if these do not read all of them.
        guards: The addresses of ``params``, for each captured direction.
        written: The parameters whose gradients the backward graph writes to their buckets itself.
        fused: An ordered set (dict keys) of the parameters whose main gradients fused kernels in the backward graph
            update.
        main_grad_guard: The addresses of these main gradients; None before a backward pass was captured.
        replays_backward: Whether the backward pass that began last is that of a replay; what the module is now may be
            that of a later forward pass.
        collected: Parameters whose gradients are complete but not handled yet, until all of the unit's are.
        kept: The buckets that keep their memory as long as there are graphs.
    """

    params: tuple[torch.nn.Parameter, ...]
    guards: dict[Direction, AddressGuard] = field(default_factory=dict)
    written: frozenset[torch.nn.Parameter] = frozenset()
    fused: dict[torch.nn.Parameter, None] = field(default_factory=dict)
    main_grad_guard: AddressGuard | None = None
    replays_backward: bool = False
    collected: list[torch.nn.Parameter] = field(default_factory=list)
    kept: frozenset[int] = frozenset()


class Recorded(Protocol):
    """Manages units whose passes are in one graph, with their collectives."""

    plans: dict[torch.nn.Module, UnitPlan]

    def collect(self, param: torch.nn.Parameter) -> bool:
        """Keep ``param``, whose gradient is complete, until ``collected``; False if the caller must handle it now."""

    def collected(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return and forget the parameters of ``module`` that ``collect`` kept."""


class RecordedModel(Recorded, Protocol):
    """Manages those of a whole model."""

    def start_gather(self) -> None:
        """Start to gather the parameters outside of units, unless they are gathered."""

    def gather_first_unit(self, phase: Direction) -> None:
        """Start to gather the first unit of a phase ahead of its own hook."""


class GraphedUnits:
    """The graphed units of one ``MegatronFSDP``.

    Args:
        fsdp: The wrapper.
        units: Its FSDP units, by module; filled while hooks are registered.

    Attributes:
        capturing: Whether graphs are being captured now. Gradients computed during capture are meaningless.
        evaluated: The modules whose graphs for evaluation are being captured now.
        recording: The owner of the passes and collectives that are being recorded now, or None.
        recorded: The owners of graphs that hold collectives.
        whole_model: That of graphs of the whole model's passes; None without such graphs.
        forward_was_eager: Whether the last forward pass with gradients was; otherwise the whole model's was replayed.
    """

    def __init__(self, fsdp: torch.nn.Module, units: Mapping[torch.nn.Module, Unit]):
        self.capturing = False
        self.evaluated: frozenset[torch.nn.Module] = frozenset()
        self.recording: Recorded | None = None
        self.recorded: list[Recorded] = []
        self.whole_model: RecordedModel | None = None
        self.forward_was_eager = True
        self._units = units
        self._fsdp = fsdp
        self._graphed_units: dict[torch.nn.Module, GraphedUnit] = {}
        self._module_of: dict[torch.nn.Parameter, torch.nn.Module] = {}  # of units whose gradients are collected
        self._holds_gradients: torch.nn.Module | None = None
        self._ran_backward: set[torch.nn.Module] = set()  # during this capture
        self._begun: dict[torch.nn.Module, bool] = {}  # in this backward pass of the model; whether replayed
        self._plans = UnitPlans(fsdp)
        self._uncaptured: list[int] = []  # buckets of units outside the last capture
        # Modules of these types have a post-backward hook that handles collected gradients.
        shards_params = fsdp.data_parallel_sharding_strategy == "optim_grads_params"
        self._released_after_backward = tuple(fsdp.fsdp_unit_modules) if shards_params else ()

    # ------------------------------------------------------------------------------------------------------- capture

    @contextmanager
    def capture(self, modules: Iterable[torch.nn.Module], keep_buckets: bool = False) -> Iterator[None]:
        """Keep the model in capture mode: raw parameters, gradients withheld, no collective in flight at either end.

        Args:
            modules: The modules that are captured, each an FSDP unit or one whose parameters are never released.
            keep_buckets: Whether graphs read no experts, and the buckets of all other parameters of ``modules`` keep
                their memory, until ``forget``.

        When the context ends, also after an exception, every bucket that capture used is released and the module's
        parameters are restored (raw, or the optimizer's ``DTensor``). After an exception none of ``modules`` counts as
        graphed.
        """
        modules = list(modules)
        with self.prepared():
            try:
                self.capturing = True
                for module in modules:
                    self._graphed_units[module] = self._with_kept_buckets(module) if keep_buckets else _whole(module)
                self._uncaptured = self._other_units(modules)
                planned = [self._units[module] for module in modules if module in self._units]
                fitting = [unit for unit in planned if self._plans.fits(unit)]
                self._plans.set_up_communicators(fitting)
                yield
                self._release_captured()
                self._make_plans(modules)
                for module in modules:
                    if isinstance(module, self._released_after_backward):
                        self._module_of |= dict.fromkeys(self._graphed_units[module].params, module)
            except BaseException:
                self.forget(modules)
                raise
            finally:
                self.capturing = False

    @contextmanager
    def capture_evaluation(self, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Keep the model in capture mode for graphs of forward passes of ``modules``, which have graphs of training.

        No parameter of a unit is gathered and no collective in flight at either end. Gradients stay as they are, and so
        do gathered parameters outside of units: a backward pass that is still to come may read them.
        """
        fsdp, modules = self._fsdp, list(modules)
        fsdp._replace_param_with_raw_if_needed()
        self._uncaptured = self._other_units(modules)
        self._release_units()
        self.capturing, self.evaluated = True, frozenset(modules)
        try:
            yield
        except BaseException:
            take_back_unlaunched(fsdp)
            raise
        finally:
            self.capturing, self.evaluated = False, frozenset()
            self._release_units()

    def _release_units(self) -> None:
        """Wait for collectives in flight, and release the parameters of all units that are released after use."""
        self.settle()
        self._fsdp.grad_reduce_pipeline.wait_for_previous_grad_reduce(0)
        self._release_buckets(self._other_units([]))

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Let the model hold raw parameters, none of them gathered, and no collective be in flight at either end.

        At the end, also after an exception, what was used in between is released, and the model holds the parameters
        that it held (raw, or the optimizer's ``DTensor``).
        """
        fsdp = self._fsdp
        distributed = fsdp.is_param_fsdp_distributed
        try:
            fsdp._replace_param_with_raw_if_needed()
            self.release_all()
            yield
        except BaseException:
            drop_collectives(fsdp)
            fsdp.param_and_grad_buffer.leave_graphs()
            raise
        finally:
            try:
                self._release_captured()
            finally:
                if distributed:
                    fsdp._replace_param_with_distributed_if_needed()

    def _release_captured(self) -> None:
        """Give back what capture holds: gradients, buckets, states."""
        self.free_held_gradients()
        self._ran_backward.clear()
        for param in self._fsdp.module.parameters():
            param.grad = None  # a failed engine may have left some
            param.grad_added_to_main_grad = False
        for module in self._fsdp.module.modules():
            module._training_state = type(module._training_state).IDLE
        self.release_all()

    def _make_plans(self, modules: Iterable[torch.nn.Module]) -> None:
        """Plan the passes of those ``modules`` that are FSDP units."""
        units = {module: self._units[module] for module in modules if module in self._units}
        self._plans.make(
            {
                module: (unit, self._graphed_units[module].written)
                for module, unit in units.items()
                if self._plans.fits(unit)
            }
        )

    def forget(self, modules: Iterable[torch.nn.Module]) -> None:
        """Forget ``modules``, which run eagerly from now on."""
        for module in modules:
            unit = self._graphed_units.pop(module, None)
            if unit is not None:
                self._plans.forget(module)
                if unit.kept:
                    self._fsdp.param_and_grad_buffer.keep_weights(unit.kept, False)
                for param in unit.params:
                    self._module_of.pop(param, None)

    def _with_kept_buckets(self, module: torch.nn.Module) -> GraphedUnit:
        """Return ``module`` as a graphed unit without experts, whose buckets keep their memory from now on."""
        if not isinstance(module, self._released_after_backward):
            return _whole(module)  # nothing is ever released
        buffer = self._fsdp.param_and_grad_buffer
        buckets = {param: buffer.param_to_param_group[param] for param in module.parameters()}
        read = tuple(param for param, bucket in buckets.items() if not buffer.parameter_groups[bucket].is_expert_param)
        kept = frozenset(buckets[param] for param in read)
        buffer.keep_weights(kept, True)
        return GraphedUnit(read, kept=kept)

    def release_all(self) -> None:
        """Wait for collectives in flight, and release every unit's parameters."""
        self.settle()
        self._fsdp.grad_reduce_pipeline.wait_for_previous_grad_reduce(0)
        if self._fsdp.data_parallel_sharding_strategy != "no_shard":
            self._fsdp.all_gather_pipeline.reset()

    def settle(self) -> None:
        """Wait for all-gathers in flight."""
        gathers = self._fsdp.all_gather_pipeline
        for bucket, bwd in list(gathers.param_gather_event_map):
            gathers.wait_bucket_ready(bucket, bwd)

    def _other_units(self, modules: Iterable[torch.nn.Module]) -> list[int]:
        """Return the buckets of FSDP units that are released after use and hold no parameter of ``modules``."""
        if not self._released_after_backward:
            return []
        buffer = self._fsdp.param_and_grad_buffer
        captured = {buffer.param_to_param_group[param] for module in modules for param in module.parameters()}
        groups = enumerate(buffer.parameter_groups)
        return [bucket for bucket, group in groups if group.fsdp_unit_id is not None and bucket not in captured]

    def _release_uncaptured(self) -> None:
        """Release prefetched buckets of units that are not captured: these do not run, so their hooks do not either."""
        self._release_buckets(self._uncaptured)

    def _release_buckets(self, buckets: Iterable[int]) -> None:
        gathers = self._fsdp.all_gather_pipeline
        for bucket in buckets:
            for bwd in (False, True):
                gathers.release_bucket(bucket, bwd)

    def free_held_gradients(self) -> None:
        """Free the gradient buckets of the unit that ran last."""
        self._free_gradients(self._holds_gradients)
        self._holds_gradients = None

    def _free_gradients(self, module: torch.nn.Module | None) -> None:
        if module is None:
            return
        buffer = self._fsdp.param_and_grad_buffer
        for bucket in {buffer.param_to_param_group[param] for param in module.parameters()}:
            if buffer.parameter_groups[bucket].main_grad_buffer is None:
                continue
            main_grads = self._fsdp.grad_reduce_pipeline.get_fsdp_buffer(bucket)
            if main_grads.is_data_distributed:
                main_grads.free_bucket_storage()
                main_grads.reset_param_main_grad()

    # ---------------------------------------------------------------------------------------------- called by hooks

    def replays(self, module: torch.nn.Module, direction: Direction = "forward") -> bool:
        """Whether ``module`` runs as a graph: in the forward pass it is called for, or in its last backward pass."""
        unit = self._graphed_units.get(module)
        if unit is None or self.capturing:
            return False
        if direction == "backward":
            return unit.replays_backward
        own = vars(module)
        return module.training and bool(own.get("cuda_graphs")) and not own.get("runs_eagerly", False)

    def backward_is_over(self) -> None:
        """Note that a backward pass of the model has ended."""
        self._begun.clear()

    def begin_backward(self, module: torch.nn.Module, replayed: bool) -> None:
        """Note that the backward pass of ``module`` begins, of a forward pass that was ``replayed`` or was not.

        Raises:
            RuntimeError: the same backward pass of the model has one of the other kind, too: their gradients would be
                summed in two places.
        """
        if self.capturing or self.recording is not None:
            return
        if self._begun.setdefault(module, replayed) is not replayed:
            _refuse_both_kinds(module)
        unit = self._graphed_units.get(module)
        if unit is not None:
            unit.replays_backward = replayed

    def begin_replayed_backward(self, modules: Iterable[torch.nn.Module]) -> None:
        """Note that the backward pass of ``modules`` begins as one replay.

        Raises:
            RuntimeError: as ``begin_backward``.
        """
        for module in modules:
            if not self._begun.setdefault(module, True):
                _refuse_both_kinds(module)

    def plan(self, module: torch.nn.Module, direction: Direction = "forward") -> UnitPlan | None:
        """Return the plan of ``module`` if it has one and runs as a graph, or is being recorded with others."""
        if self.recording is not None:
            return self.recording.plans.get(module)
        plan = self._plans.of(module)
        return plan if plan is not None and self.replays(module, direction) else None

    def plans_to_gather(self, units: Mapping[torch.nn.Module, Unit]) -> dict[torch.nn.Module, UnitPlan]:
        """Return plans for ``units`` that are about to be recorded together; see ``UnitPlans``."""
        return self._plans.to_gather(units)

    def gathers_of(self, buckets: Iterable[int], recorded: bool) -> list[GroupGather]:
        """Return the all-gathers of ``buckets`` that belong to no unit, recorded if so asked; see ``UnitPlans``."""
        return self._plans.gathers_of(buckets, recorded)

    def recorded_collectives(self) -> int:
        """Return how many graphs hold collectives alone."""
        return self._plans.recorded_collectives()

    def forget_gathers(self, buckets: Iterable[int]) -> None:
        """Free the graphs of ``gathers_of``."""
        self._plans.forget_gathers(buckets)

    def can_have_plan(self, unit: Unit) -> bool:
        """Whether ``unit`` will have a plan once it is captured."""
        return self._plans.fits(unit)

    def writes(self, module: torch.nn.Module, params: Iterable[torch.nn.Parameter]) -> None:
        """Note that the backward graph of ``module`` writes the gradients of ``params`` to their buckets itself."""
        self._graphed_units[module].written |= frozenset(params)

    def covers(self, module: torch.nn.Module, direction: Direction = "forward") -> bool:
        """Whether ``module`` runs as a graph, or is being captured."""
        return module in self._graphed_units and (self.capturing or self.replays(module, direction))

    def params_of(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return the parameters that are gathered for the graphs of ``module``, be they for evaluation only."""
        unit = self._graphed_units.get(module)
        return list(module.parameters() if unit is None else unit.params)

    def runs_backward_eagerly(self, module: torch.nn.Module) -> bool:
        """Whether ``module`` has graphs and its backward pass is none of theirs."""
        if self.capturing or self.recording is not None:
            return False
        if any(module in recorded.plans for recorded in self.recorded):
            return True
        return module in self._graphed_units and not self.replays(module, "backward")

    def parameters_gathered(self, module: torch.nn.Module, direction: Direction) -> None:
        """Record the addresses of the parameters of ``module`` at capture; compare them before a replay.

        Raises:
            MovedBufferError: a parameter is not where the graph reads it.
        """
        if self.recording is not None:
            return
        if self.capturing:  # for evaluation also modules that have no graphs of their own for training
            self.settle()  # prefetches too: no collective may be in flight while a graph records
            self._release_uncaptured()
        if not self.covers(module, direction):
            return
        unit = self._graphed_units[module]
        guard = unit.guards.get(direction)
        if guard is None:
            name = self._fsdp.param_to_name
            unit.guards[direction] = AddressGuard(
                lambda: unit.params, lambda i: f"{name[unit.params[i]]} (in {direction})", ADVICE
            )
        else:
            guard.check()

    def fused_gradients(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return the parameters whose main gradients the replay of ``module``'s backward graph writes."""
        return list(self._graphed_units[module].fused) if self.replays(module, "backward") else []

    def gradients_claimed(self, module: torch.nn.Module) -> None:
        """Compare the addresses of the main gradients that the graph of ``module`` will write.

        Raises:
            MovedBufferError: a main gradient is not where the graph writes it.
        """
        if self.fused_gradients(module):
            guard = self._graphed_units[module].main_grad_guard
            if guard is not None:
                guard.check()

    def mark_fused_gradient(self, param: torch.nn.Parameter) -> None:
        """Set the flag of the fused kernel on ``param`` if a graph has added its gradient to its main gradient."""
        module = self._module_of.get(param)
        if module is not None and param in self._graphed_units[module].fused and self.replays(module, "backward"):
            param.grad_added_to_main_grad = True

    def collect_gradient(self, param: torch.nn.Parameter) -> bool:
        """Keep ``param`` until ``collected_gradients`` if its gradient comes from a graph.

        Handling all gradients of a unit at once saves host time. Returns False if the caller must handle it now.
        """
        if self.recording is not None:
            return self.recording.collect(param)
        module = self._module_of.get(param)
        if module is None or not self.replays(module, "backward"):
            return False
        self._graphed_units[module].collected.append(param)
        return True

    def collected_gradients(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return and forget the parameters of ``module`` that ``collect_gradient`` kept."""
        if self.recording is not None:
            return self.recording.collected(module)
        unit = self._graphed_units.get(module)
        if unit is None:
            return []
        collected, unit.collected = unit.collected, []
        return collected

    def forget_collected(self) -> None:
        """Forget collected gradients of units whose post-backward hook never fires: their inputs need no gradient."""
        for unit in self._graphed_units.values():
            unit.collected = []

    def backward_begins(self, module: torch.nn.Module) -> None:
        """Before a captured backward pass, make sure that the unit's gradient buckets can go where they belong.

        The last unit of a pass still holds its buckets when the next pass begins, perhaps in the same place.
        """
        if self.capturing and module in self._ran_backward:
            self.free_held_gradients()

    def backward_done(self, module: torch.nn.Module) -> None:
        """After a captured backward pass, note fused gradients and release the previous unit's buckets.

        Buckets are released one unit late, as in training, so that units take the two buffers in turn: where a unit's
        buckets go first, they belong.
        """
        if not self.capturing or module not in self._graphed_units:
            return
        self._note_fused_gradients(self._graphed_units[module])
        if self._holds_gradients is not module:
            self._free_gradients(self._holds_gradients)
        self._holds_gradients = module
        self._ran_backward.add(module)

    def _note_fused_gradients(self, unit: GraphedUnit) -> None:
        fused = tuple(param for param in unit.params if param.grad_added_to_main_grad)
        for param in fused:
            param.grad_added_to_main_grad = False
        unit.fused = dict.fromkeys(fused)
        unit.main_grad_guard = AddressGuard(
            lambda: [param.main_grad for param in fused],
            lambda i: f"the main gradient of {self._fsdp.param_to_name[fused[i]]}",
            ADVICE,
        )


def _refuse_both_kinds(module: torch.nn.Module) -> NoReturn:
    raise RuntimeError(
        f"{type(module).__name__}: one backward pass has a forward pass that CUDA graphs replayed and one that ran "
        "eagerly (of another shape, say). Call backward() for each loss by itself"
    )


def _whole(module: torch.nn.Module) -> GraphedUnit:
    return GraphedUnit(tuple(module.parameters()))
