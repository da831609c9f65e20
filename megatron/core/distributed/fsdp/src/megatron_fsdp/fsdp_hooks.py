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
around the module. They carry the sentinels by which ``megatron.core.transformer._cuda_graphs.hooks`` finds the handler.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_map, tree_unflatten

from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer._cuda_graphs.evaluation_mode import may_replay_evaluation
from megatron.core.transformer._cuda_graphs.hooks import BACKWARD_HANDLER, BACKWARD_PRE_HANDLER, runs_outside_graphs
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import is_submodule

from ._graphs.backward_pass import Phase
from ._graphs.fsdp_graphs import FsdpGraphs
from ._graphs.pipelines import release_units
from ._graphs.runners import Eager
from ._graphs.unit import TrainingState, Unit, shown_in_profiles
from .mixed_precision import fp8_discard_transpose_cache, is_float8tensor

LAYERS = (TransformerLayer, MambaLayer)


def _hook(method: Callable) -> Callable:
    """Mark ``method`` as a hook: shown in profiles, never compiled, and never run while a graph records."""
    hook: Callable = torch.compiler.disable(runs_outside_graphs(shown_in_profiles(method)))
    return hook


class FsdpHooks:
    """The hooks of one ``MegatronFSDP``.

    Attributes:
        fsdp: The wrapper whose pipelines and buffers the hooks drive.
        graphs: Its graphs, which decide what runs a pass.
        forward_failed: Whether an exception ended the last forward pass of the whole model.
    """

    def __init__(self, graphs: FsdpGraphs):
        self.fsdp, self.graphs, self.backward = graphs.fsdp, graphs, graphs.backward
        self.module_names = self.backward.module_names  # for profiles
        self.forward_failed = False
        self._outside_layers: frozenset[torch.nn.Parameter] = frozenset()
        self._unit_types = tuple(self.fsdp.fsdp_unit_modules)
        self._has_float8_params = False

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
                self.graphs.units[module] = Unit.of(module, fsdp.param_and_grad_buffer.param_to_param_group)
                units.append(module)
                self._register_unit(name, module)
            else:
                self._register_other(name, module)
        self._register_root(root, last)
        groups = fsdp.param_and_grad_buffer.parameter_groups
        self._has_float8_params = any(is_float8tensor(param) for group in groups for param in group.params)
        trainable = dict.fromkeys(param for group in groups if group.requires_grad for param in group.params)
        self.backward.trainable.update(trainable)
        layers = [module for module in self.module_names if isinstance(module, LAYERS)]
        self._outside_layers = frozenset(trainable).difference(*(layer.parameters() for layer in layers))

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

    def _register_unit(self, name, module):
        hooks = self.fsdp
        hooks.forward_hooks[f"release module {name} parameters"] = module.register_forward_hook(
            self.release_after_forward
        )
        self._register_backward_unshard(module)
        # As megatron-core 0.20 does. 0.19 does so where parameters are sharded, and otherwise has units only if told.
        attach = partial(self.attach_after_backward, self.release_after_backward)
        setattr(attach, BACKWARD_HANDLER, self.release_after_backward)
        hooks.forward_pre_hooks[f"module {name} register post-backward hook"] = module.register_forward_pre_hook(
            attach, with_kwargs=True
        )
        self._register_gradients(module.parameters())

    def _register_other(self, name, module):
        if self.graphs.shards_params and not self.fsdp.ddp_config.keep_fp8_transpose_cache:
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

    @_hook
    def unshard_for_forward(
        self, module: torch.nn.Module, args: tuple = (), kwargs: dict | None = None, *, runner: Eager | None = None
    ) -> None:
        """Gather the parameters that ``module`` is about to use; ``runner`` is that of a schedule that replays it."""
        recomputing = module._training_state == TrainingState.PRE_BACKWARD
        if not recomputing:
            module.__dict__["_training_state"] = TrainingState.FORWARD
        (runner or self.graphs.runner_of(module)).gather("forward", prefetch=not recomputing)

    @_hook
    def release_after_forward(self, module: torch.nn.Module, args: tuple = (), output: Any = None) -> None:
        """Release the parameter bucket of a unit; lazily while backward recomputes the unit and needs it again."""
        recomputing = module._training_state == TrainingState.PRE_BACKWARD
        if not recomputing:
            module.__dict__["_training_state"] = TrainingState.IDLE
        self.graphs.runner_of(module).release("forward", lazy=recomputing)

    @_hook
    def unshard_for_backward(
        self, module: torch.nn.Module, grad: torch.Tensor | None = None, *, runner: Eager | None = None
    ) -> None:
        """Gather the parameters of ``module`` for its backward pass, whose forward pass had ``runner``."""
        (runner or self.graphs.runner_of(module)).before_backward()

    @_hook
    def release_after_backward(self, module: torch.nn.Module) -> None:
        """Handle the unit's gradients that are left, and release its parameter buckets."""
        runner = self.backward.runners.get(module)
        (runner or self.graphs.runner_of(module)).after_backward()

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
        if getattr(param, "skip_backward_post_hook", False):  # delayed, with a hook of its own
            return
        if self.backward.phase is Phase.IN_PARTS and param in self._outside_layers:
            return
        runner = self.backward.takers.get(param)
        if runner is not None:
            runner.collect(param)
            return
        passes = self.graphs.passes
        if passes is not None and passes.whole and self.graphs.captured is None:
            self.backward.note_beside_graphs(param)
        self.graphs.gradients.handle([param])

    # ---------------------------------------------------------------------------------------- the whole model's pass

    @_hook
    def start_backward(self, module: torch.nn.Module, grad: torch.Tensor | None = None) -> None:
        """Open the model's backward pass: no prefetch or release by forward hooks, all gradients still to come."""
        # A captured layer can hold all of the model's parameters (one layer on a pipeline stage, say); its backward
        # pass at capture is not one of the model. Where that is captured, the capture opens it.
        if self.graphs.captured is None:
            self.backward.start()

    @shown_in_profiles
    def start_backward_in_parts(self) -> None:
        """Open a backward pass that runs embedding, layers and output layer each by itself; the caller will close it.

        A parameter that several of them share gets a gradient from each. So those outside of layers are left to the
        end of the pass: only then are they complete. A bucket that was reduced before would be written to while it
        is reduced, and reduced again.
        """
        self.backward.start(caller_ends_it=True)
        self.backward.phase = Phase.IN_PARTS

    def before_forward(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Called before a forward pass of the whole model, with its arguments; drops what an exception ended."""
        if self.backward.phase is not Phase.CLOSED:
            self.backward.forward_begins()
        if self.forward_failed:  # the layer that failed and the next one hold the double buffer
            self.forward_failed = False
            release_units(self.fsdp)
        graphs = self.graphs
        if graphs.passes is not None and torch.is_grad_enabled():
            graphs.passes.replayed = False
        if graphs.before_evaluation and not (self.fsdp.training or self.backward.is_open) and may_replay_evaluation():
            expecting, graphs.before_evaluation = graphs.before_evaluation, []
            for prepare in expecting:
                prepare(args, kwargs)

    # ------------------------------------------------------------------------------- around a module, into autograd

    @torch.compiler.disable
    @runs_outside_graphs
    def attach_after_backward(
        self, handler: Callable, module: torch.nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        """Forward-pre hook that makes autograd call ``handler(module)`` once ``module``'s backward pass is over."""
        if not torch.is_grad_enabled():
            return None
        if self.graphs.runner_of(module).frames_backward:
            self._refuse_at_capture(module, "forward_pre_hooks", BACKWARD_HANDLER)
            return None
        return call_after_backward(partial(handler, module), args, kwargs)

    @torch.compiler.disable
    @runs_outside_graphs
    def attach_before_backward(
        self, handler: Callable, module: torch.nn.Module, inputs: Any, output: Any, *, runner: Eager | None = None
    ) -> Any:
        """Forward hook that makes autograd call ``handler(module, grads)`` at the first gradient of ``output``.

        What the forward pass was run by, ``runner`` where a schedule says it, goes into autograd's graph.
        """
        call = partial(handler, module)
        if handler == self.unshard_for_backward:
            runner = runner or self.graphs.runner_of(module)
            if runner.frames_backward:
                self._refuse_at_capture(module, "forward_hooks", BACKWARD_PRE_HANDLER)
                return None
            call = partial(call, runner=runner)
        elif (passes := self.graphs.passes) is not None and passes.whole and passes.replayed:
            return None  # which starts the backward pass
        return call_before_backward(call, output)

    def _refuse_at_capture(self, module: torch.nn.Module, kind: str, sentinel: str) -> None:
        """Refuse to run as a hook of a module whose own graph is being captured: the engine gets the handler instead.

        Raises RuntimeError: the hook has lost its sentinel, so that capture cannot tell it from others.
        """
        if self.graphs.captured and module in self.graphs.captured:
            raise RuntimeError(
                f"Megatron-FSDP's {kind} hook of {type(module).__name__} ran in a capture, as it has no {sentinel}: do "
                "not copy or change Megatron-FSDP's hooks"
            )

    def around_part(self, module: torch.nn.Module, runner: Eager) -> Callable[..., Any] | None:
        """Return what replays ``module`` for a schedule that does not call it, so that no hooks run; None for nothing.

        ``--overlap-moe-expert-parallel-comm`` runs layers in parts, so that the experts' tokens of one micro-batch
        travel while another is computed. Parameters are then gathered in hooks of the modules below a layer, and none
        of those in a graph is called. The schedule releases parameters itself.
        """
        if self.fsdp.data_parallel_sharding_strategy == "no_shard":
            return None  # nothing is ever gathered

        def replay(graphed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.unshard_for_forward(module, runner=runner)
            output = graphed(*args, **kwargs)
            if not self.graphs.shards_params:
                return output
            return self.attach_before_backward(self.unshard_for_backward, module, args, output, runner=runner)

        return replay


class RunAfterBackward(torch.autograd.Function):
    """An identity function of tensors, whose backward pass first calls a handler."""

    @staticmethod
    def forward(ctx: Any, handler: Callable[[], object], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.handler = handler
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.handler()
        return None, *grads


_PLAIN = (torch.Tensor, type(None), bool, int, float, str)  # what layers are mostly called with


def call_after_backward(handler: Callable[[], object], args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Make autograd call ``handler`` once the backward pass of a module that gets these arguments is over.

    Returns the arguments to give it, whose tensors went through an identity function: the module must not change them
    in place. None if no tensor among them requires a gradient: nothing will be called.
    """
    leaves, spec = [*args, *kwargs.values()], None
    if not _are_leaves(leaves):
        leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.requires_grad]
    if not places:
        return None
    wrapped = RunAfterBackward.apply(handler, *(leaves[i] for i in places))
    for place, tensor in zip(places, wrapped, strict=True):
        leaves[place] = tensor
    if spec is not None:
        return tree_unflatten(leaves, spec)
    return tuple(leaves[: len(args)]), dict(zip(kwargs, leaves[len(args) :], strict=True))


def call_before_backward(handler: Callable[[Any], object], output: Any) -> Any:
    """Make autograd call ``handler`` with the gradients at the first gradient of ``output``, what a module returned.

    Returns the output to take in its place. Its tensors are views, so that one that is also an input is a tensor of its
    own.
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
    """Whether none of ``values`` is a container with tensors in it: walking through one costs the host many calls."""
    return all(map(tree_is_leaf, [value for value in values if not isinstance(value, _PLAIN)]))


def _view_of(leaf: Any) -> Any:
    return leaf.view_as(leaf) if torch.is_tensor(leaf) else leaf
