"""The hooks that Megatron-FSDP registers on a model, each a named method of one object.

In a training step they run in this order for an FSDP unit (a layer, with ``optim_grads_params``):

====================================  =========================================================================
before forward                        ``unshard_for_forward``: gather the unit's parameters, prefetch the next unit's
after forward                         ``release_after_forward``: release the parameter bucket
before backward                       ``unshard_for_backward``: gather them again
when a gradient is complete           ``handle_gradient``: move it to its bucket, reduce the bucket when it is full
after backward                        ``release_after_backward``: release the parameter bucket
====================================  =========================================================================

Other modules gather their own direct parameters before forward and keep them. ``start_backward`` and
``finish_backward`` frame the backward pass of the whole model.

Autograd has no hook that runs before or after the backward pass of a module, so ``attach_*`` insert one into the graph
around the module (``around_backward``). They carry the sentinels by which
``megatron.core.transformer._cuda_graphs.hooks`` finds the handler.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import MethodType
from typing import Any, Literal

import torch

from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer._cuda_graphs.evaluation_mode import may_replay_evaluation
from megatron.core.transformer._cuda_graphs.hooks import BACKWARD_HANDLER, BACKWARD_PRE_HANDLER, runs_outside_graphs
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import is_submodule

from .around_backward import call_after_backward, call_before_backward
from .fsdp_gathering_replay import GatheringReplay
from .fsdp_gradient_sink import UnitSink, handled_later, has_gradient_hooks
from .fsdp_graphed_units import GraphedUnits
from .fsdp_model import WholeModel
from .fsdp_recorded_units import RecordedLayers, RecordedUnits
from .fsdp_unit import Unit
from .mixed_precision import fp8_discard_transpose_cache, is_float8tensor
from .param_and_grad_buffer import PrefetchOrder, _check_nan_in_grad, to_local_if_dtensor
from .training_state import TrainingState
from .unsharded_gradients import REDUCES_EVERY_BACKWARD, UnshardedGradients

LAYERS = (TransformerLayer, MambaLayer)
COLLECTIVES_STAY_OUTSIDE = (
    "its collectives cannot be in graphs (that needs --data-parallel-sharding-strategy optim_grads_params, "
    "--fsdp-double-buffer, one level of sharding, no FP8 parameters, and no NCCL_GRAPH_MIXING_SUPPORT=0)"
)


def shown_in_profiles[**P, R](phase: Callable[P, R]) -> Callable[P, R]:
    """Show the method ``phase`` of ``FsdpHooks`` in profiles, by its name and that of its module."""

    @wraps(phase)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.autograd._profiler_enabled():
            return phase(*args, **kwargs)
        hooks: Any = args[0]
        name = hooks.module_names.get(args[1], "") if len(args) > 1 else ""
        with torch.profiler.record_function(f"FSDP::{phase.__name__} ({name})"):
            return phase(*args, **kwargs)

    return run


class FsdpHooks:
    """Owns the hooks of one ``MegatronFSDP`` and the state they share.

    Attributes:
        fsdp: The wrapper whose pipelines and buffers the hooks drive.
        graphed: The units that run as CUDA graphs, and whether capture is under way.
        awaiting_gradient: Parameters whose gradient this backward pass has not handled yet.
        in_backward: Whether a backward pass of the model is in progress.
        backward_was_eager: Whether a gradient has come, since the last step, from more than replays of the whole model.
        backward_has_reduced: Whether a backward pass since the last step has reduced gradients.
        module_names: The name of each module in the model, for profiles.
        recorded: The owners of graphs that hold collectives.
        model_passes: That of graphs of the whole model's passes; None without such graphs.
        before_evaluation: Called once with the arguments of the model, and forgotten, before the next forward pass in
            evaluation.
    """

    def __init__(self, fsdp: torch.nn.Module):
        self.fsdp = fsdp
        self._fsdp_units: dict[torch.nn.Module, Unit] = {}
        self.graphed = GraphedUnits(fsdp, self._fsdp_units)
        self.awaiting_gradient: set[torch.nn.Parameter] = set()
        self.in_backward = False
        self.module_names: dict[torch.nn.Module, str] = {}
        self.recorded: list[RecordedUnits] = []
        self.model_passes: WholeModel | None = None
        self._forward_was_eager = True  # the last one with gradients; otherwise a replay of the whole model's graph
        self._expects_gradients = False  # the backward pass that is open
        self.backward_was_eager = True
        self.backward_has_reduced = False
        self.before_evaluation: list[Callable[[tuple, dict[str, Any]], object]] = []
        self._trainable: dict[torch.nn.Parameter, None] = {}  # an ordered set, whose hashes are known
        self._outside_layers: frozenset[torch.nn.Parameter] = frozenset()
        self._sinks: dict[torch.nn.Module, UnitSink] = {}
        self._caller_ends_backward = False
        self._in_parts = False
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
        self._trainable = dict.fromkeys(param for group in groups if group.requires_grad for param in group.params)
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
        if self.recorded and self.model_passes is None and module not in self._fsdp_units:
            prefetch = False  # of units that a replay gathers, on this rank or another
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
        self.handle_gradients(self.graphed.collected_gradients(module))
        plan = self.graphed.plan(module, "backward")
        if plan is not None:
            self.handle_gradients(plan.left)
            plan.reduce()
            self.awaiting_gradient -= plan.written
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
        if self._in_parts and param in self._outside_layers:
            return
        self.graphed.mark_fused_gradient(param)
        if not self.graphed.collect_gradient(param):
            self.handle_gradients([param])

    @torch.compiler.disable
    def handle_gradients(self, params: list[torch.nn.Parameter]) -> None:
        """Move the gradients of ``params`` to their buckets and reduce the buckets that are complete.

        Gradients of shared parameters are left to ``finish_backward``: only then are they complete.
        """
        if not params:
            return
        params = [param for param in params if not getattr(param, "_is_shared", False)]
        for param in params:
            if getattr(param, "skip_backward_post_hook", False) and not hasattr(param, "post_wgrad_grad_acc_hook"):
                raise RuntimeError(
                    f"{self.fsdp.param_to_name[param]} has a delayed weight gradient but no hook to accumulate it"
                )
        if params:
            self._accumulate_and_reduce(params)
            self.awaiting_gradient.difference_update(params)

    def _accumulate_and_reduce(self, params: list[torch.nn.Parameter]) -> bool:
        """Accumulate each gradient, then reduce them if this pass reduces; return whether it does."""
        self.backward_was_eager = True
        self.accumulate(params)
        fsdp = self.fsdp
        last_microbatch = getattr(fsdp, "is_last_microbatch", False) or fsdp.model_auto_sync
        reduces = last_microbatch or fsdp.data_parallel_sharding_strategy in REDUCES_EVERY_BACKWARD
        if reduces:
            self.backward_has_reduced = True
            fsdp.grad_reduce_pipeline.reduce_gradients(
                params,
                suggested_queue_capacity=fsdp.suggested_RS_queue_capacity,
                outer_fsdp_group_grad_reduce=fsdp.dist_index.use_hybrid_fsdp and last_microbatch,
            )
        return reduces

    def accumulate(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Add each gradient to its main gradient, unless a fused kernel has done so already."""
        buffer = self.fsdp.param_and_grad_buffer
        copied_to, copied_from = [], []
        claimed: dict[int, Any] = {}
        for param in params:
            bucket = buffer.param_to_param_group[param]
            group = buffer.parameter_groups[bucket]
            if not group.requires_grad:
                continue
            sharded = (group.hfsdp_helper_gbuf or group.main_grad_buffer).is_data_distributed
            if not param.grad_added_to_main_grad and (sharded or param.grad is not None):
                if param.grad is not None and self.fsdp.report_nan_in_param_grad:
                    _check_nan_in_grad(to_local_if_dtensor(param.grad))
                main_grad = self._claim_main_grad(param, bucket, claimed)
                if param.grad is None:
                    main_grad.zero_()
                elif sharded:  # the bucket is new in every backward pass; the reduction adds to the shard
                    copied_to.append(main_grad)
                    copied_from.append(to_local_if_dtensor(param.grad))
                else:
                    main_grad.add_(to_local_if_dtensor(param.grad))
            if param.grad is not None:
                del param.grad
            param.grad_added_to_main_grad = False
        if copied_to:
            torch._foreach_copy_(copied_to, copied_from)

    def _claim_main_grad(self, param: torch.nn.Parameter, bucket: int, claimed: dict[int, Any]) -> torch.Tensor:
        """Return ``param.main_grad``, a view of its bucket for this backward pass.

        Args:
            param: The parameter.
            bucket: Its bucket's index.
            claimed: The storage of each bucket that the caller has claimed already, by index.
        """
        main_grads = param._gbuf
        if bucket in claimed:
            item = main_grads.get_item_from_bucket(claimed[bucket], param._item_id)
            param.main_grad = item.view(to_local_if_dtensor(param).shape)
        else:
            param.main_grad = param.get_main_grad()
            dtype = self.fsdp.mp_policy.grad_comm_dtype if main_grads.is_data_distributed else None
            claimed[bucket] = main_grads.fetch_bucket(dtype=dtype)
        return param.main_grad

    def gradient_sink(self, module: torch.nn.Module, whole: bool) -> UnitSink | None:
        """Return what takes the gradients of ``module`` in its backward graph; None if autograd has to handle them.

        Args:
            module: A module that is about to be captured.
            whole: Whether its graphs hold all that it computes.
        """
        unit = self._fsdp_units.get(module)
        if unit is None or not self.graphed.can_have_plan(unit) or any(map(has_gradient_hooks, unit.params)):
            return None
        self._sinks[module] = sink = UnitSink(self, module, unit, whole)
        return sink

    def around_parts(self, module: torch.nn.Module, graphed: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``graphed`` with the hooks that a schedule leaves out, which replays ``module`` without calling it.

        The schedule releases parameters itself.
        """
        if self.fsdp.data_parallel_sharding_strategy == "no_shard":
            return graphed  # nothing is ever gathered
        return GatheringReplay(self, module, graphed, self._shards_params)

    def against_recording(self, modules: Iterable[torch.nn.Module]) -> str:
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
        return RecordedLayers(self, {layer: self._fsdp_units[layer] for layer in layers}, begin)

    def against_whole_model(self) -> str:
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
        return WholeModel(self, self._fsdp_units, begin)

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
            skip_backward_hook: Whether the caller will call ``finish_backward`` itself.
            replayed: Whether the pass is a replay of the whole model's graph, which leaves nothing to do for hooks.
        """
        # A captured layer can hold all of the model's parameters (one layer on a pipeline stage, say); its backward
        # pass at capture is not one of the model.
        if self.graphed.capturing:
            return
        if not self.in_backward:
            self.in_backward, self._caller_ends_backward = True, skip_backward_hook
            if not skip_backward_hook:
                torch.autograd.Variable._execution_engine.queue_callback(self.finish_backward)
        if not (replayed or self._expects_gradients):
            self._expect_gradients()

    def _expect_gradients(self) -> None:
        fsdp = self.fsdp
        self._expects_gradients = True
        groups = fsdp.param_and_grad_buffer.parameter_groups
        if self._shards_params:
            self._set_training_states(TrainingState.PRE_BACKWARD)
            gathers = fsdp.all_gather_pipeline
            for bucket, group in enumerate(groups):
                if group.fsdp_unit_id is not None:
                    gathers.bucket_can_be_released[gathers.get_bucket_key(bucket, bwd=False)] = True
        self.awaiting_gradient = set(self._trainable)
        for param in self.awaiting_gradient:
            param.grad_added_to_main_grad = False
        if self.model_passes is not None:
            self.model_passes.gather_first_unit("backward")  # as ranks do that replay this pass

    def start_backward_in_parts(self) -> None:
        """Open a backward pass that runs embedding, layers and output layer each by itself; the caller will close it.

        A parameter that several of them share gets a gradient from each. So those outside of layers are left to
        ``finish_backward``: only then are they complete. A bucket that was reduced before would be written to while it
        is reduced, and reduced again.
        """
        self.start_backward(None, skip_backward_hook=True)
        self._in_parts = True

    @shown_in_profiles
    def finish_backward(self) -> None:
        """Close the model's backward pass: handle the remaining parameters, and finish the reductions."""
        fsdp = self.fsdp
        if self._expects_gradients:
            self.graphed.forget_collected()  # they are still in awaiting_gradient
            if self.handle_rest(self._trainable):
                fsdp.grad_reduce_pipeline.reset()
        self.in_backward = self._in_parts = self._expects_gradients = False
        self.graphed.backward_is_over()
        fsdp.__dict__["microbatch_count"] += 1  # bypasses Module.__setattr__, which is slow
        if fsdp.model_auto_sync:
            fsdp.finish_grad_sync()

    def handle_rest(self, params: Iterable[torch.nn.Parameter]) -> bool:
        """Handle those of ``params`` that await their gradient and will get no other; return whether they are reduced."""
        rest = sorted(self.awaiting_gradient.intersection(params), key=self.fsdp.param_to_name.__getitem__)
        self.awaiting_gradient.difference_update(rest)
        return self._accumulate_and_reduce(rest)

    def _set_training_states(self, state: Any) -> None:
        for module in self.module_names:
            module.__dict__["_training_state"] = state

    def before_forward(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Called before a forward pass of the whole model, with its arguments; drops an unfinished backward pass.

        Two kinds of forward passes are allowed within a backward pass: activation checkpointing of the whole model, and
        schedules that call ``finish_backward`` themselves.
        """
        if self.in_backward and not self._caller_ends_backward and torch._C._current_graph_task_id() == -1:
            self._drop_unfinished_backward()
        if torch.is_grad_enabled():
            self._forward_was_eager = True
        if self.before_evaluation and not (self.fsdp.training or self.in_backward) and may_replay_evaluation():
            expecting, self.before_evaluation = self.before_evaluation, []
            for prepare in expecting:
                prepare(args, kwargs)

    def forward_is_replayed(self, replayed: bool) -> None:
        """Called within a forward pass with gradients, whether it is a replay of the whole model's graph."""
        self._forward_was_eager = not replayed

    def before_step(self) -> None:
        """Called when gradients are zeroed; drops an unfinished backward pass."""
        if self.in_backward:
            self._drop_unfinished_backward()

    def _drop_unfinished_backward(self) -> None:
        """Clean up after a backward pass that an exception ended: autograd does not call ``finish_backward`` then.

        Later passes would otherwise count as a part of it, and neither reduce all gradients nor release parameters.
        """
        warnings.warn(
            "Megatron-FSDP: an exception ended the last backward pass. Gradients that were not reduced are dropped; "
            "those that were are in the main gradients, so call zero_grad_buffer() and optimizer.zero_grad() before "
            "the next step.",
            stacklevel=4,
        )
        self.forget_backward()

    def forget_backward(self) -> None:
        """Forget a backward pass that did not come to its end, and drop its gradients."""
        self.close_backward()
        fsdp = self.fsdp
        for param in fsdp.raw_param.values():
            param.grad = None
            param.grad_added_to_main_grad = False
        for ready in fsdp.grad_reduce_pipeline.bucket_grad_ready_params:
            ready.clear()
        fsdp.grad_reduce_pipeline.reset()
        self.graphed.release_all()

    def close_backward(self) -> None:
        """Let no backward pass be open, and expect no gradient."""
        self.in_backward = self._in_parts = self._expects_gradients = False
        self.awaiting_gradient.clear()
        self.graphed.forget_collected()
        self.graphed.backward_is_over()
        self._set_training_states(TrainingState.IDLE)

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
            return not self._forward_was_eager
        sink = self._sinks.get(module)
        if sink is None or not sink.whole or self.graphed.plan(module, "forward") is None:
            return False
        return handler in (self.unshard_for_backward, self.release_after_backward)


def _may_replay_evaluation(module: torch.nn.Module) -> bool:
    """Whether ``module`` has a graph for the pass in evaluation that begins."""
    return not module.training and getattr(module, "evaluation_graph", None) is not None and may_replay_evaluation()
