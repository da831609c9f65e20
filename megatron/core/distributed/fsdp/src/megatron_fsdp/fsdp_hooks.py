"""The hooks that Megatron-FSDP registers on a model, each a named method of one object.

In a training step they run in this order for an FSDP unit (a layer, with ``optim_grads_params``):

====================================  =========================================================================
before forward                        ``unshard_for_forward``: gather the unit's parameters, prefetch the next unit's
after forward                         ``release_after_forward``: release the parameter bucket
before backward                       ``unshard_for_backward``: gather them again
when a gradient is complete           ``handle_gradient``: move it to its bucket, reduce the bucket when it is full
after backward                        ``release_after_backward``: release the parameter bucket
====================================  =========================================================================

Other modules gather their own direct parameters before forward and keep them. ``start_backward`` opens the backward
pass of the whole model (``BackwardPass``), which handles at its end what is left.

Autograd has no hook that runs before or after the backward pass of a module, so ``attach_*`` insert one into the graph
around the module (``around_backward``). They carry the sentinels by which
``megatron.core.transformer._cuda_graphs.hooks`` finds the handler.
"""

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch

from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer._cuda_graphs.evaluation_mode import may_replay_evaluation
from megatron.core.transformer._cuda_graphs.hooks import BACKWARD_HANDLER, BACKWARD_PRE_HANDLER, runs_outside_graphs
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import is_submodule

from ._graphs.backward_pass import BackwardPass, Phase
from ._graphs.gathering_replay import GatheringReplay
from ._graphs.gradient_sink import UnitSink, handled_later, has_gradient_hooks
from ._graphs.gradients import Gradients
from ._graphs.graphed_units import GraphedUnits
from ._graphs.recorded_units import RecordedLayers
from ._graphs.unit import Unit
from ._graphs.whole_model import WholeModel
from .around_backward import call_after_backward, call_before_backward
from .mixed_precision import fp8_discard_transpose_cache, is_float8tensor
from .param_and_grad_buffer import PrefetchOrder
from .profiles import shown_in_profiles
from .training_state import TrainingState
from .unsharded_gradients import UnshardedGradients

LAYERS = (TransformerLayer, MambaLayer)
COLLECTIVES_STAY_OUTSIDE = (
    "its collectives cannot be in graphs (that needs --data-parallel-sharding-strategy optim_grads_params, "
    "--fsdp-double-buffer, one level of sharding, no FP8 parameters, and no NCCL_GRAPH_MIXING_SUPPORT=0)"
)


class FsdpHooks:
    """Owns the hooks of one ``MegatronFSDP`` and the state they share.

    Attributes:
        fsdp: The wrapper whose pipelines and buffers the hooks drive.
        graphed: The units that run as CUDA graphs, and whether capture is under way.
        gradients: The gradients.
        backward: The backward pass of the model.
        module_names: The name of each module in the model, for profiles.
        before_evaluation: Called once with the arguments of the model, and forgotten, before the next forward pass in
            evaluation.
    """

    def __init__(self, fsdp: torch.nn.Module):
        self.fsdp = fsdp
        self._fsdp_units: dict[torch.nn.Module, Unit] = {}
        self.graphed = GraphedUnits(fsdp, self._fsdp_units)
        self.gradients = Gradients(fsdp)
        self.module_names: dict[torch.nn.Module, str] = {}
        self._trainable: dict[torch.nn.Parameter, None] = {}  # an ordered set, whose hashes are known
        self.backward = BackwardPass(fsdp, self.gradients, self.graphed, self.module_names, self._trainable)
        self.before_evaluation: list[Callable[[tuple, dict[str, Any]], object]] = []
        self._outside_layers: frozenset[torch.nn.Parameter] = frozenset()
        self._sinks: dict[torch.nn.Module, UnitSink] = {}
        self._unit_types = tuple(fsdp.fsdp_unit_modules)
        self._has_float8_params = False
        self._in_place: UnshardedGradients = fsdp.param_and_grad_buffer.unsharded_gradients
        self._shards_params = fsdp.data_parallel_sharding_strategy == "optim_grads_params"

    def __deepcopy__(self, memo: dict) -> "FsdpHooks":
        """A copied module keeps the hooks of the wrapper it was registered with; the wrapper is not copied."""
        return self

    # ------------------------------------------------------------------------------------------------ registration

    def register(self, root: torch.nn.Module) -> None:
        """Register every hook on ``root``, its submodules and their parameters."""
        fsdp = self.fsdp
        for module in root.modules():
            module._training_state = TrainingState.IDLE
        units: list[torch.nn.Module] = []
        last = root
        for name, module in root.named_modules():
            last = module
            self.module_names[module] = name
            if fsdp.enable_fine_grained_param_gather_hook:
                self._register_forward_unshard(module)
            if fsdp.enable_fine_grained_param_gather_backward_hook:
                self._register_backward_unshard(module)
            if any(is_submodule(module, unit) for unit in units):
                continue
            if not fsdp.enable_fine_grained_param_gather_hook:
                self._register_forward_unshard(module)
            if isinstance(module, self._unit_types):
                self._unit(module)
                units.append(module)
                self._register_unit(name, module)
            else:
                self._register_other(name, module)
        self._register_root(root, last)
        groups = fsdp.param_and_grad_buffer.parameter_groups
        self._has_float8_params = any(is_float8tensor(param) for group in groups for param in group.params)
        self._trainable |= dict.fromkeys(param for group in groups if group.requires_grad for param in group.params)
        layers = [module for module in self.module_names if isinstance(module, LAYERS)]
        self._outside_layers = frozenset(self._trainable).difference(*(layer.parameters() for layer in layers))

    def _register_forward_unshard(self, module):
        if self.fsdp.data_parallel_sharding_strategy == "no_shard":
            return  # nothing is ever gathered
        self.fsdp.forward_pre_hooks[f"{module._get_name()} parameter unshard"] = module.register_forward_pre_hook(
            self.unshard_for_forward, prepend=True, with_kwargs=True
        )

    def _register_backward_unshard(self, module):
        self.fsdp.backward_pre_hooks[f"all-gather {module._get_name()} parameters"] = self._register_before_backward(
            module, self.unshard_for_backward
        )

    def _unit(self, module: torch.nn.Module) -> Unit:
        if module not in self._fsdp_units:
            if not isinstance(module, self._unit_types):
                raise TypeError(f"{type(module).__name__} is not an FSDP unit: others may still use its parameters")
            self._fsdp_units[module] = Unit.of(module, self.fsdp.param_and_grad_buffer.param_to_param_group)
        return self._fsdp_units[module]

    def _register_unit(self, name, module):
        hooks = self.fsdp
        hooks.forward_hooks[f"release module {name} parameters"] = module.register_forward_hook(
            self.release_after_forward
        )
        self._register_backward_unshard(module)
        if self._shards_params:
            attach = partial(self.attach_after_backward, self.release_after_backward)
            setattr(attach, BACKWARD_HANDLER, self.release_after_backward)
            hooks.forward_pre_hooks[f"module {name} register post-backward hook"] = module.register_forward_pre_hook(
                attach, with_kwargs=True
            )
        self._register_gradients(module.parameters())

    def _register_other(self, name, module):
        if self._shards_params and not self.fsdp.ddp_config.keep_fp8_transpose_cache:
            self.fsdp.forward_hooks[f"remove module {name} fp8 transpose cache"] = module.register_forward_hook(
                self.release_transpose_cache
            )
        self._register_gradients(module.parameters(recurse=False))

    def _register_gradients(self, params):
        # Parameters hold these hooks where Python's garbage collector does not look: a model would never be freed.
        handle_gradient = MethodType(FsdpHooks.handle_gradient, weakref.proxy(self))
        for param in params:
            if param.requires_grad:
                name = self.fsdp.param_to_name[param]
                self.fsdp.grad_acc_hooks[f"grad_acc and reduce for {name}"] = param.register_post_accumulate_grad_hook(
                    handle_gradient
                )

    def _register_root(self, root, last):
        # The user may call a submodule that holds every parameter (the one inside a precision wrapper, say).
        parameters = len(list(root.parameters()))
        for name, module in root.named_modules():
            if len(list(module.parameters())) == parameters:
                self.fsdp.backward_pre_hooks[f"{name} _root_pre_backward"] = self._register_before_backward(
                    module, self.start_backward
                )
        # megatron-core also frames backward at the last module of the walk; whichever comes first starts it.
        self.fsdp._root_pre_backward_hook_handle = self._register_before_backward(last, self.start_backward)
        self.fsdp._load_state_dict_post_hook = root.register_load_state_dict_post_hook(self.install_loaded_parameters)
        for module in self.fsdp.modules():
            module.register_state_dict_pre_hook(self.show_distributed_parameters)

    def _register_before_backward(self, module, handler):
        attach = partial(self.attach_before_backward, handler)
        setattr(attach, BACKWARD_PRE_HANDLER, handler)
        return module.register_forward_hook(attach)

    # -------------------------------------------------------------------------------------------------- parameters

    @torch.compiler.disable
    @runs_outside_graphs
    @shown_in_profiles
    def unshard_for_forward(self, module: torch.nn.Module, args: tuple = (), kwargs: dict | None = None) -> None:
        """Gather the parameters that ``module`` is about to use."""
        recomputing = module._training_state == TrainingState.PRE_BACKWARD
        if not recomputing:
            module.__dict__["_training_state"] = TrainingState.FORWARD
            plan = self.graphed.plan(module, "forward")
            if plan is not None:
                plan.gather("forward")
                self.graphed.parameters_gathered(module, "forward")
                return
        self._gather(module, "forward", prefetch=not recomputing)
        self.graphed.parameters_gathered(module, "forward")

    @torch.compiler.disable
    @runs_outside_graphs
    @shown_in_profiles
    def unshard_for_backward(
        self, module: torch.nn.Module, grad: torch.Tensor | None = None, *, replayed: bool = False
    ) -> None:
        """Gather the parameters of ``module`` for its backward pass, that of a forward pass that was ``replayed``."""
        self.graphed.begin_backward(module, replayed)
        if module in self._fsdp_units:
            self._fsdp_units[module].set_training_state(TrainingState.PRE_BACKWARD)
        else:  # fine-grained hooks are on every module
            for submodule in module.modules():
                submodule._training_state = TrainingState.PRE_BACKWARD
        plan = self.graphed.plan(module, "backward")
        if plan is not None:
            plan.gather("backward")
        else:
            self._gather(module, "backward")
        self.graphed.parameters_gathered(module, "backward")
        if plan is not None:
            plan.claim()
        if self.graphed.capturing:
            if self._shards_params and module in self._fsdp_units:
                self._discard_transposes(self._unit(module))  # freed later; the graph makes its own
            self.graphed.backward_begins(module)
            if module in self._sinks:
                self._sinks[module].claim_buckets()
        for param in self.graphed.fused_gradients(module):
            param.main_grad = param.get_main_grad()
        self.graphed.gradients_claimed(module)

    def _gather(
        self, module: torch.nn.Module, direction: Literal["forward", "backward"], *, prefetch: bool = True
    ) -> None:
        params = self._parameters_to_gather(module, direction)
        if not params:
            return
        backward = direction == "backward"
        gather = partial(
            self.fsdp.all_gather_and_wait_parameters_ready,
            params,
            prefetch_order=PrefetchOrder.BACKWARD_PASS_ORDER if backward else PrefetchOrder.FORWARD_PASS_ORDER,
            bwd=backward,
        )
        if backward and self.graphed.runs_backward_eagerly(module):
            # Other ranks may replay, and gather the module before what they prefetch.
            gather(prefetch=False)
        gather(prefetch=prefetch)
        if self._in_place.fused:
            self._in_place.let_kernels_add(params)

    def _parameters_to_gather(
        self, module: torch.nn.Module, direction: Literal["forward", "backward"]
    ) -> list[torch.nn.Parameter]:
        fsdp = self.fsdp
        if self.graphed.covers(module, direction):  # in a graph no submodule gathers for itself
            return self.graphed.params_of(module)
        fine_grained = (
            fsdp.enable_fine_grained_param_gather_hook
            if direction == "forward"
            else fsdp.enable_fine_grained_param_gather_backward_hook
        )
        if not fine_grained and module in self._fsdp_units:
            return self._fsdp_units[module].params
        if direction == "forward" and (module in self.graphed.evaluated or _may_replay_evaluation(module)):
            return self.graphed.params_of(module)
        whole = fine_grained and isinstance(module, fsdp.fine_grained_recurse_module_types)
        return list(module.parameters(recurse=whole))

    @torch.compiler.disable
    @runs_outside_graphs
    @shown_in_profiles
    def release_after_forward(self, module: torch.nn.Module, args: tuple = (), output: Any = None) -> None:
        """Release the parameter bucket of a unit; lazily while backward recomputes the unit and needs it again."""
        recomputing = module._training_state == TrainingState.PRE_BACKWARD
        if not recomputing:
            module.__dict__["_training_state"] = TrainingState.IDLE
            plan = self.graphed.plan(module, "forward")
            if plan is not None:
                plan.release()
                return
        self._release(module, bwd=False, lazy=recomputing)

    @runs_outside_graphs
    @shown_in_profiles
    def release_after_backward(self, module: torch.nn.Module) -> None:
        """Handle the unit's collected gradients, and release both of its parameter buckets."""
        self.gradients.handle(self.graphed.collected_gradients(module))
        plan = self.graphed.plan(module, "backward")
        if plan is not None:
            self.gradients.handle(plan.left)
            plan.reduce()
            self.gradients.awaited -= plan.written
            plan.release()
            plan.unit.set_training_state(TrainingState.IDLE)
            return
        self._release(module, bwd=True)
        self._release(module, bwd=False)
        self._unit(module).set_training_state(TrainingState.IDLE)
        self.graphed.backward_done(module)

    def _release(self, module, bwd, lazy=False):
        unit = self._unit(module)
        for bucket in unit.buckets:
            self.fsdp.all_gather_pipeline.release_bucket(bucket, bwd, lazy=lazy)
        self._discard_transposes(unit)

    def _discard_transposes(self, unit: Unit) -> None:
        """Drop the FP8 transposes of a unit, unless they are kept, each in one place."""
        if not self.fsdp.ddp_config.keep_fp8_transpose_cache:
            for param in unit.float8_params:
                fp8_discard_transpose_cache(param)

    def install_loaded_parameters(self, module: torch.nn.Module, incompatible_keys: Any) -> None:
        """Copy the parameters that ``load_state_dict`` has set into the weights that the model computes with."""
        self.fsdp.install_optimized_model_weights()

    def show_distributed_parameters(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        """Let ``state_dict`` find the optimizer's ``DTensor`` parameters."""
        self.fsdp._replace_param_with_distributed_if_needed()

    @torch.compiler.disable
    @runs_outside_graphs
    def release_transpose_cache(self, module: torch.nn.Module, args: tuple = (), output: Any = None) -> None:
        """Drop the FP8 transposes that ``module``'s own parameters cached in forward."""
        if self._has_float8_params:
            for param in module.parameters(recurse=False):
                if is_float8tensor(param):
                    fp8_discard_transpose_cache(param)

    # --------------------------------------------------------------------------------------------------- gradients

    def handle_gradient(self, param: torch.nn.Parameter) -> None:
        """Called by autograd when ``param.grad`` is complete."""
        # A parameter with a delayed weight gradient has its own hook; gradients of a capture are meaningless.
        if getattr(param, "skip_backward_post_hook", False) or self.graphed.capturing:
            return
        if self.backward.in_parts and param in self._outside_layers:
            return
        self.graphed.mark_fused_gradient(param)
        if not self.graphed.collect_gradient(param):
            self.gradients.handle([param])

    def gradient_sink(self, module: torch.nn.Module, whole: bool) -> UnitSink | None:
        """Return what takes the gradients of ``module`` in its backward graph; None if autograd has to handle them.

        Args:
            module: A module that is about to be captured.
            whole: Whether its graphs hold all that it computes.
        """
        unit = self._fsdp_units.get(module)
        if unit is None or not self.graphed.can_have_plan(unit) or any(map(has_gradient_hooks, unit.params)):
            return None
        self._sinks[module] = sink = UnitSink(
            self.gradients,
            unit,
            writes=partial(self.graphed.writes, module),
            whole=whole,
            before=partial(self.unshard_for_backward, module, replayed=True) if whole else None,
            after=partial(self.release_after_backward if whole else self.gradients_written, module),
        )
        return sink

    def around_parts(self, module: torch.nn.Module, graphed: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``graphed`` with the hooks that a schedule leaves out, which replays ``module`` without calling it.

        The schedule releases parameters itself.
        """
        if self.fsdp.data_parallel_sharding_strategy == "no_shard":
            return graphed  # nothing is ever gathered
        after_forward = partial(self.attach_before_backward, self.unshard_for_backward, module)
        return GatheringReplay(
            graphed, partial(self.unshard_for_forward, module), after_forward if self._shards_params else None
        )

    def recording_blocker(self, modules: Iterable[torch.nn.Module]) -> str:
        """Say why the passes of ``modules`` cannot be recorded with their collectives; empty if they can."""
        name_of = self.fsdp.param_to_name
        for module in modules:
            unit = self._fsdp_units.get(module)
            if unit is None or not self.graphed.can_have_plan(unit):
                return COLLECTIVES_STAY_OUTSIDE
            for param in unit.params:
                if has_gradient_hooks(param):
                    return f"parameter {name_of[param]} has hooks"
                if handled_later(param):
                    return f"the gradient of {name_of[param]} is completed elsewhere"
        return ""

    def recorded_layers(self, layers: Iterable[torch.nn.Module], begin: Callable[[str], object]) -> RecordedLayers:
        """Return the owner of graphs of all ``layers``; ``begin`` as of ``MegatronFSDP.recorded_layers``."""
        units = {layer: self._fsdp_units[layer] for layer in layers}
        return RecordedLayers(self.fsdp, self.graphed, self.backward, self.gradients, units, begin)

    def whole_model_blocker(self) -> str:
        """Say why the whole model's passes cannot be graphs; empty if they can."""
        fsdp = self.fsdp
        if not self._fsdp_units or not all(map(self.graphed.can_have_plan, self._fsdp_units.values())):
            return COLLECTIVES_STAY_OUTSIDE
        if fsdp.model_auto_sync:
            return "Megatron-FSDP synchronizes the model in every micro-batch"
        for param in self._trainable:
            if has_gradient_hooks(param):
                return f"parameter {fsdp.param_to_name[param]} has hooks"
            if getattr(param, "skip_backward_post_hook", False):
                return f"the weight gradient of {fsdp.param_to_name[param]} is delayed"
        return ""

    def whole_model(self, begin: Callable[[str], object]) -> WholeModel:
        """Return the owner of the graphs of the whole model's passes; ``begin`` as of ``MegatronFSDP.whole_model``."""
        return WholeModel(self.fsdp, self.graphed, self.backward, self.gradients, self._fsdp_units, begin)

    def gradients_written(self, module: torch.nn.Module) -> None:
        """Called when the backward graph of ``module`` has written gradients to their buckets."""
        plan = self.graphed.plan(module, "backward")
        for param in () if plan is None else plan.written:
            param.grad_added_to_main_grad = True

    # ---------------------------------------------------------------------------------------- the whole model's pass

    @runs_outside_graphs
    @shown_in_profiles
    def start_backward(
        self,
        module: torch.nn.Module | None,
        grad: torch.Tensor | None = None,
        *,
        skip_backward_hook: bool = False,
        replayed: bool = False,
    ) -> None:
        """Open the model's backward pass: no prefetch or release by forward hooks, all gradients still to come.

        Args:
            module: The module whose output gradient came first; not used.
            grad: That gradient; not used.
            skip_backward_hook: Whether the caller will close the pass itself.
            replayed: Whether the pass is a replay of the whole model's graph, which leaves nothing to do for hooks.
        """
        # A captured layer can hold all of the model's parameters (one layer on a pipeline stage, say); its backward
        # pass at capture is not one of the model.
        if not self.graphed.capturing:
            self.backward.start(caller_ends_it=skip_backward_hook, replayed=replayed)

    def start_backward_in_parts(self) -> None:
        """Open a backward pass that runs embedding, layers and output layer each by itself; the caller will close it.

        A parameter that several of them share gets a gradient from each. So those outside of layers are left to the
        end of the pass: only then are they complete. A bucket that was reduced before would be written to while it
        is reduced, and reduced again.
        """
        self.start_backward(None, skip_backward_hook=True)
        self.backward.in_parts = True

    def before_forward(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Called before a forward pass of the whole model, with its arguments; drops an unfinished backward pass."""
        if self.backward.phase is not Phase.CLOSED:
            self.backward.forward_begins()
        if torch.is_grad_enabled():
            self.graphed.forward_was_eager = True
        if self.before_evaluation and not (self.fsdp.training or self.backward.is_open) and may_replay_evaluation():
            expecting, self.before_evaluation = self.before_evaluation, []
            for prepare in expecting:
                prepare(args, kwargs)

    # ------------------------------------------------------------------------------- around a module, into autograd

    @torch.compiler.disable
    def attach_after_backward(
        self, handler: Callable, module: torch.nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """Forward-pre hook that makes autograd call ``handler(module)`` once ``module``'s backward pass is over."""
        if not torch.is_grad_enabled() or self._runs_around_replays(handler, module):
            return None
        return call_after_backward(partial(handler, module), args, kwargs)

    @torch.compiler.disable
    def attach_before_backward(self, handler: Callable, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        """Forward hook that makes autograd call ``handler(module, grads)`` at the first gradient of ``output``."""
        if self._runs_around_replays(handler, module):
            return None
        call = partial(handler, module)
        if handler == self.unshard_for_backward:
            call = partial(call, replayed=self.graphed.replays(module))
        return call_before_backward(call, output)

    def _runs_around_replays(self, handler: Callable, module: torch.nn.Module) -> bool:
        """Whether the replay of the backward graph of ``module`` calls ``handler`` itself."""
        if handler == self.start_backward:
            return not self.graphed.forward_was_eager
        sink = self._sinks.get(module)
        if sink is None or not sink.whole or self.graphed.plan(module, "forward") is None:
            return False
        return handler in (self.unshard_for_backward, self.release_after_backward)


def _may_replay_evaluation(module: torch.nn.Module) -> bool:
    """Whether ``module`` has a graph for the pass in evaluation that begins."""
    return not module.training and getattr(module, "evaluation_graph", None) is not None and may_replay_evaluation()
