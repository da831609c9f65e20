"""Implement the hooks that Megatron-FSDP registers on a model as named methods of one object.

In a training step, the hooks of an FSDP unit (a layer, with ``optim_grads_params``) run in this order:

====================================  =========================================================================
before forward                        ``unshard_for_forward``: gather the unit's parameters, prefetch the next unit's
after forward                         ``release_after_forward``: release the parameter bucket
before backward                       ``unshard_for_backward``: gather them again
when a gradient is complete           ``handle_gradient``: move it to its bucket, reduce the bucket when it is full
after backward                        ``release_after_backward``: release the parameter bucket
====================================  =========================================================================

Other modules gather their direct parameters before forward and keep them. ``start_backward`` opens the backward pass of
the whole model (``BackwardPass``), which reduces the remaining gradients at its end.

Autograd has no hooks before or after the backward pass of a module, so the ``attach_*`` hooks insert them into its
graph around the module. Sentinels on these hooks let ``megatron.core.transformer._cuda_graphs.hooks`` find the handler.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_map, tree_unflatten

from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer._cuda_graphs.evaluation_mode import may_replay_evaluation
from megatron.core.transformer._cuda_graphs.hooks import BACKWARD_HANDLER, BACKWARD_PRE_HANDLER, runs_outside_graphs
from megatron.core.transformer.transformer_layer import TransformerLayer

from ._graphs.backward_pass import Phase
from ._graphs.fsdp_graphs import FsdpGraphs
from ._graphs.pipelines import TrainingState, set_training_state, shown_in_profiles
from ._graphs.runners import EagerRunner
from .mixed_precision import fp8_discard_transpose_cache, is_float8tensor

LAYERS = (TransformerLayer, MambaLayer)


def _hook(method: Callable) -> Callable:
    """Decorate ``method`` as a hook: shown in profiles, never compiled, and never run while a graph is recorded."""
    hook: Callable = torch.compiler.disable(runs_outside_graphs(shown_in_profiles(method)))
    return hook


class FsdpHooks:
    """The hooks of one ``MegatronFSDP``.

    Args:
        graphs: The wrapper's graphs, which select the runner of each pass.
        identity: megatron-core's autograd function, an identity whose backward pass first calls a handler.

    Attributes:
        forward_failed: Whether the last forward pass of the whole model ended with an exception.
    """

    def __init__(self, graphs: FsdpGraphs, identity: Any):
        self._identity = identity
        self.fsdp, self.graphs, self.backward = graphs.fsdp, graphs, graphs.backward
        self.module_names = self.backward.module_names  # for profiles
        self.forward_failed = False
        self._outside_layers: frozenset[torch.nn.Parameter] = frozenset()

    def __deepcopy__(self, memo: dict) -> "FsdpHooks":
        """Return this object, so that copied modules keep their hooks and the wrapper is not copied."""
        return self

    def register(self, root: torch.nn.Module) -> None:
        """Register all hooks on ``root``, its submodules and their parameters."""
        fsdp = self.fsdp
        set_training_state(root.modules(), TrainingState.IDLE)
        in_units: set[torch.nn.Module] = set()
        last = root
        for name, module in root.named_modules():
            last = module
            self.module_names[module] = name
            self.graphs.eager[module] = runner = EagerRunner(self.graphs, module)
            if fsdp.enable_fine_grained_param_gather_hook:
                self._register_forward_unshard(module)
            if fsdp.enable_fine_grained_param_gather_backward_hook:
                self._register_before_backward(module, self.unshard_for_backward)
            if module in in_units:
                continue
            if not fsdp.enable_fine_grained_param_gather_hook:
                self._register_forward_unshard(module)
            if runner.is_unit:
                self.graphs.units[module] = runner
                in_units.update(module.modules())
                module.register_forward_hook(self.release_after_forward)
                self._register_before_backward(module, self.unshard_for_backward)
                # Same as megatron-core 0.20; 0.19 registers this hook only if parameters are sharded, because otherwise
                # it has no units by default.
                attach = partial(self.attach_after_backward, self.release_after_backward)
                setattr(attach, BACKWARD_HANDLER, self.release_after_backward)
                module.register_forward_pre_hook(attach, with_kwargs=True)
            elif runner.float8_params and self.graphs.shards_params and not fsdp.ddp_config.keep_fp8_transpose_cache:
                module.register_forward_hook(self.release_transpose_cache)
            self._register_gradients(module.parameters(recurse=runner.is_unit))
        self._register_root(root, last)
        groups = fsdp.param_and_grad_buffer.parameter_groups
        trainable = dict.fromkeys(param for group in groups if group.requires_grad for param in group.params)
        self.backward.trainable.update(trainable)
        layers = [module for module in self.module_names if isinstance(module, LAYERS)]
        self._outside_layers = frozenset(trainable).difference(*(layer.parameters() for layer in layers))

    def _register_forward_unshard(self, module: torch.nn.Module) -> None:
        if self.fsdp.data_parallel_sharding_strategy != "no_shard":  # nothing is ever gathered
            module.register_forward_pre_hook(self.unshard_for_forward, prepend=True, with_kwargs=True)

    def _register_gradients(self, params: Iterable[torch.nn.Parameter]) -> None:
        # Parameters store these hooks where Python's garbage collector cannot see them: a strong reference would leak
        # the model.
        handle_gradient = MethodType(FsdpHooks.handle_gradient, weakref.proxy(self))
        for param in params:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(handle_gradient)

    def _register_root(self, root: torch.nn.Module, last: torch.nn.Module) -> None:
        # The user may call a submodule that contains every parameter (the one inside a precision wrapper, for example).
        parameters = len(list(root.parameters()))
        for module in root.modules():
            if len(list(module.parameters())) == parameters:
                self._register_before_backward(module, self.start_backward)
        # As in megatron-core, the last module also starts the backward pass; the first of these hooks to run opens it.
        self._register_before_backward(last, self.start_backward)
        root.register_load_state_dict_post_hook(self.install_loaded_parameters)
        for module in self.fsdp.modules():
            module.register_state_dict_pre_hook(self.show_distributed_parameters)

    def _register_before_backward(self, module: torch.nn.Module, handler: Callable) -> None:
        attach = partial(self.attach_before_backward, handler)
        setattr(attach, BACKWARD_PRE_HANDLER, handler)
        module.register_forward_hook(attach)

    @_hook
    def unshard_for_forward(self, module: torch.nn.Module, args: tuple = (), kwargs: dict | None = None) -> None:
        """Gather the parameters of ``module`` for its forward pass."""
        recomputing = module._training_state == TrainingState.PRE_BACKWARD
        if not recomputing:
            module.__dict__["_training_state"] = TrainingState.FORWARD
        self.graphs.runner_of(module).gather("forward", prefetch=not recomputing)

    @_hook
    def release_after_forward(self, module: torch.nn.Module, args: tuple = (), output: Any = None) -> None:
        """Release the parameter bucket of a unit; lazily during recomputation, because backward needs it again."""
        recomputing = module._training_state == TrainingState.PRE_BACKWARD
        if not recomputing:
            module.__dict__["_training_state"] = TrainingState.IDLE
        self.graphs.runner_of(module).release("forward", lazy=recomputing)

    @_hook
    def unshard_for_backward(
        self, module: torch.nn.Module, grad: torch.Tensor | None = None, *, runner: EagerRunner | None = None
    ) -> None:
        """Gather the parameters of ``module`` for its backward pass, with the ``runner`` of its forward pass."""
        (runner or self.graphs.runner_of(module)).before_backward()

    @_hook
    def release_after_backward(self, module: torch.nn.Module) -> None:
        """Accumulate and reduce the collected gradients of a unit, and release its parameter buckets."""
        runner = self.backward.runners.get(module)
        (runner or self.graphs.runner_of(module)).after_backward()

    def install_loaded_parameters(self, module: torch.nn.Module, incompatible_keys: Any) -> None:
        """Copy the parameters loaded by ``load_state_dict`` to the model's compute weights."""
        self.fsdp.install_optimized_model_weights()

    def show_distributed_parameters(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        """Make ``state_dict`` return the optimizer's ``DTensor`` parameters."""
        self.fsdp.param_and_grad_buffer.check_main_weights()
        self.fsdp._replace_param_with_distributed_if_needed()

    @torch.compiler.disable
    @runs_outside_graphs
    def release_transpose_cache(self, module: torch.nn.Module, args: tuple = (), output: Any = None) -> None:
        """Discard the FP8 transposes that the direct parameters of ``module`` cached in forward."""
        for param in module.parameters(recurse=False):
            if is_float8tensor(param):
                fp8_discard_transpose_cache(param)

    def handle_gradient(self, param: torch.nn.Parameter) -> None:
        """Accumulate the complete ``param.grad`` and reduce full buckets, or queue ``param`` in its module's runner."""
        if getattr(param, "skip_backward_post_hook", False):  # delayed; a separate hook handles it
            return
        if self.backward.phase is Phase.IN_PARTS and param in self._outside_layers:
            return
        runner = self.backward.takers.get(param)
        if runner is not None:
            runner.collect(param)
            return
        if self.graphs.whole_passes is not None and self.graphs.captured is None:
            self.backward.note_beside_graphs(param)
        self.graphs.gradients.handle([param])

    @_hook
    def start_backward(self, module: torch.nn.Module, grad: torch.Tensor | None = None) -> None:
        """Open the model's backward pass; see ``BackwardPass.start``."""
        # A captured layer can contain all of the model's parameters (as the only layer of a pipeline stage, for
        # example); its backward pass during capture is not the model's. Captures of the whole model open the pass.
        if self.graphs.captured is None:
            self.backward.start()

    @shown_in_profiles
    def start_backward_in_parts(self) -> None:
        """Open a backward pass that runs embedding, layers and output layer separately; the caller closes it.

        A parameter shared by several parts gets a gradient from each, so gradients outside of layers are complete only
        at the end. Reducing after each part would read incomplete buckets, and reduce gradients repeatedly.
        """
        self.backward.start(caller_ends_it=True)
        self.backward.phase = Phase.IN_PARTS

    def before_forward(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Clean up after failed passes, and call ``graphs.before_evaluation`` if it is due.

        Call this before a forward pass of the whole model, with its arguments.
        """
        if self.backward.phase is not Phase.CLOSED:
            self.backward.forward_begins()
        graphs = self.graphs
        if self.forward_failed:  # the failed layer and the next one occupy the double buffer
            self.forward_failed = False
            for unit in graphs.units.values():  # the same state as after a complete pass
                unit.release("forward")
                unit.release("backward")
        if graphs.whole_passes is not None and torch.is_grad_enabled():
            graphs.whole_passes.replayed = False
        prepare = graphs.before_evaluation
        if prepare and not (self.fsdp.training or self.backward.is_open) and may_replay_evaluation():
            graphs.before_evaluation = None
            prepare(args, kwargs)

    @torch.compiler.disable
    @runs_outside_graphs
    def attach_after_backward(
        self, handler: Callable, module: torch.nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """Forward pre-hook that makes autograd call ``handler(module)`` after the backward pass of ``module``."""
        if not torch.is_grad_enabled():
            return None
        if self.graphs.runner_of(module).frames_backward:
            self._refuse_at_capture(module, "forward_pre_hooks", BACKWARD_HANDLER)
            return None
        return call_after_backward(partial(self._identity.apply, partial(handler, module)), args, kwargs)

    @torch.compiler.disable
    @runs_outside_graphs
    def attach_before_backward(self, handler: Callable, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        """Forward hook that makes autograd call ``handler(module, grads)`` at the first gradient of ``output``."""
        call = partial(handler, module)
        if handler == self.unshard_for_backward:
            runner = self.graphs.runner_of(module)
            if runner.frames_backward:
                self._refuse_at_capture(module, "forward_hooks", BACKWARD_PRE_HANDLER)
                return None
            call = partial(call, runner=runner)
        elif (passes := self.graphs.whole_passes) is not None and passes.replayed:
            return None  # the replay starts the backward pass
        return call_before_backward(call, output)

    def _refuse_at_capture(self, module: torch.nn.Module, kind: str, sentinel: str) -> None:
        """Raise RuntimeError if a hook runs during the capture of ``module``, which should have removed it.

        This happens if the hook has lost its ``sentinel``. The message names the ``kind`` of hook.
        """
        if self.graphs.captured and module in self.graphs.captured:
            raise RuntimeError(
                f"Megatron-FSDP's {kind} hook of {type(module).__name__} ran during a capture because it lacks "
                f"{sentinel}: do not copy or change Megatron-FSDP's hooks"
            )


_PLAIN = (torch.Tensor, type(None), bool, int, float, str)  # the usual arguments of layers


def call_after_backward(identity: Callable[..., Any], args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Pass a module's arguments through ``identity``, whose backward pass then runs after the module's.

    Returns:
        The arguments to call the module with, or None if no tensor requires a gradient. Tensors that require one are
        outputs of ``identity``, so the module must not modify them in place.
    """
    leaves, spec = [*args, *kwargs.values()], None
    if not _are_leaves(leaves):
        leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.requires_grad]
    if not places:
        return None
    wrapped = identity(*(leaves[i] for i in places))
    for place, tensor in zip(places, wrapped, strict=True):
        leaves[place] = tensor
    if spec is not None:
        return tree_unflatten(leaves, spec)
    return tuple(leaves[: len(args)]), dict(zip(kwargs, leaves[len(args) :], strict=True))


def call_before_backward(handler: Callable[[Any], object], output: Any) -> Any:
    """Make autograd call ``handler`` once in backward, as soon as any tensor of a module's ``output`` gets a gradient.

    Returns:
        Views of ``output`` for the module to return. Without views, an input that the module returns unchanged would
        get the hook.
    """
    if torch.is_tensor(output):
        output = output.view_as(output)
    elif type(output) is tuple and _are_leaves(output):
        output = tuple(map(_view_of, output))
    else:
        output = tree_map(_view_of, output)
    tensors = [output] if torch.is_tensor(output) else output if isinstance(output, (tuple, list)) else []
    torch.autograd.graph.register_multi_grad_hook(
        [tensor for tensor in tensors if torch.is_tensor(tensor)], handler, mode="any"
    )
    return output


def _are_leaves(values: Sequence[Any]) -> bool:
    """Return whether ``values`` contains no nested containers."""
    return all(map(tree_is_leaf, [value for value in values if not isinstance(value, _PLAIN)]))


def _view_of(leaf: Any) -> Any:
    return leaf.view_as(leaf) if torch.is_tensor(leaf) else leaf
