"""Extend ``MegatronFSDP`` to support CUDA graphs, with hooks that are named methods of one object."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_fsdp_cuda_graphs.overlay import extend

from ._graphs.fsdp_graphs import FsdpGraphs
from ._graphs.pipelines import TrainingState  # noqa: F401
from .fsdp_hooks import FsdpHooks
from .parameter_swap import ParameterSwap

_upstream: Any = extend(__name__)


class MegatronFSDP(_upstream.MegatronFSDP):
    """Replaces the hooks of megatron-core's ``MegatronFSDP`` with ``fsdp_hooks.FsdpHooks``.

    Arguments, methods and behavior match megatron-core.

    Attributes:
        graphs: The CUDA graphs of the model.
    """

    fsdp_hooks: FsdpHooks
    graphs: FsdpGraphs
    is_param_fsdp_distributed: bool
    _parameter_swap: ParameterSwap | None = None

    def _init_fsdp_param_and_grad_buffer(self) -> None:
        # With ``average_in_collective`` megatron-core requires the number of ranks that share an expert, even in dense
        # models.
        index, experts = self.dist_index, None
        if index.get_dp_group(is_expert_parallel=True) is None:
            experts = "hybrid_fsdp_expt_group" if index.use_hybrid_fsdp else "expt_fsdp_group"
            setattr(index, experts, index.get_dp_group())
        try:
            super()._init_fsdp_param_and_grad_buffer()
        finally:
            if experts is not None:
                setattr(index, experts, None)

    def _register_fsdp_hooks(self, root_module: torch.nn.Module) -> None:
        self.graphs = FsdpGraphs(self)
        self.fsdp_hooks = hooks = FsdpHooks(self.graphs, _upstream.RegisterFSDPBackwardFunction)
        hooks.register(root_module)
        for module in root_module.modules():
            _upstream.setup_delayed_wgrad_acc_hook(module, self.graphs.gradients.handle)
        # Schedules that run a layer in parts call these by name.
        self.post_forward_release_module = hooks.release_after_forward
        self.post_backward_release_module = hooks.release_after_backward
        self.pre_backward = hooks.start_backward_in_parts
        self.post_backward = hooks.backward.finish_backward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; see megatron-core. Warn if the last backward pass ended with an exception."""
        self.fsdp_hooks.before_forward(inputs, kwargs)
        try:
            return super().forward(*inputs, **kwargs)
        except BaseException:
            self.fsdp_hooks.forward_failed = True
            raise

    def zero_grad_buffer(self) -> None:
        """Zero all gradients; see megatron-core. Warn if the last backward pass ended with an exception.

        Raises:
            ValueError: A parameter was unfrozen after the model was wrapped. Megatron-FSDP would not train it.
        """
        self.graphs.backward.drop_unfinished()
        named = self.raw_param.items()
        if self.is_param_fsdp_distributed:
            named = self.param_and_grad_buffer.optimizer_named_parameters
        trained = [param for _, param in named if param.requires_grad]
        for param in trained:
            param.grad_added_to_main_grad = False
        if len(trained) > len(trainable := self.graphs.backward.trainable):
            thawed = {getattr(param, "orig_param", param) for param in trained} - trainable.keys()
            name = self.param_to_name[thawed.pop()]
            raise ValueError(
                f"requires_grad of {name} is on, but was off when the model was wrapped, so Megatron-FSDP does not "
                "train it: leave it on when wrapping, and set the learning rate to 0 until the parameter should train"
            )
        self.param_and_grad_buffer.zero_grad()

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Start gathering parameters for the next forward pass; see megatron-core."""
        gathers = self.ddp_config.fsdp_all_gather_in_start_param_sync
        if gathers and not force_sync and self.ddp_config.overlap_param_gather:
            self._replace_param_with_raw_if_needed()
            if self.graphs.whole_passes is not None:
                self.graphs.whole_passes.start_gather()
            elif self.data_parallel_sharding_strategy != "no_shard":
                if self.graphs.has_graphs:
                    self.all_gather_pipeline.gather_across_replicas()
                first = next(self.module.parameters())
                self.all_gather_and_wait_parameters_ready(params=[first], prefetch=True, wait_bucket_ready=False)
            return
        super().start_param_sync(*unused, force_sync=force_sync, force_dispatch=force_dispatch)

    def synchronize_param_gather(self) -> None:
        """Wait for all-gathers and release the parameters; see megatron-core. The next pass gathers them again."""
        self.all_gather_pipeline.gathered_across_replicas = False
        super().synchronize_param_gather()

    def attach_grad_to_optimizer_state(self) -> None:
        """Pass the reduced gradients to the optimizer; see megatron-core.

        Unsharded gradients are scaled first if a backward pass has finished since the last call.
        """
        if self.microbatch_count:
            self.param_and_grad_buffer.unsharded_gradients.scale()
        super().attach_grad_to_optimizer_state()

    def synchronize_gradient_reduce(self) -> None:
        """Finish the reduction of gradients, and reset every bucket; see megatron-core.

        Replays of the whole model leave no buckets to reset. Without ``overlap_grad_reduce``, megatron-core's method
        reduces gradients, so it is not called if a backward pass has already reduced them.
        """
        gradients = self.graphs.gradients
        self.all_gather_pipeline.gathered_across_replicas = False  # the optimizer will change the weights
        if self.graphs.whole_passes is not None and gradients.reduced is None:
            self.grad_reduce_pipeline.wait_for_previous_grad_reduce(0)
            return
        if self.ddp_config.overlap_grad_reduce or not gradients.reduced:
            super().synchronize_gradient_reduce()
        else:
            self.grad_reduce_pipeline.reset()
        gradients.reduced = None

    def start_grad_sync(self, *unused: Any) -> None:
        """Start reducing gradients, unless backward passes do so; see megatron-core.

        Pipeline schedules call this as ``grad_sync_func`` after the last backward pass. They mark that pass as the last
        of the step only on the first stage.

        Raises:
            RuntimeError: Gradients were left unreduced because the last pass was not marked.
        """
        if self.ddp_config.overlap_grad_reduce:
            self.graphs.gradients.check_final()
        super().start_grad_sync(*unused)

    def _replace_param_with_distributed_if_needed(self) -> None:
        self._exchange_parameters(True, super()._replace_param_with_distributed_if_needed)

    def _replace_param_with_raw_if_needed(self) -> None:
        self._exchange_parameters(False, super()._replace_param_with_raw_if_needed)

    def _exchange_parameters(self, distributed: bool, exchange_by_name: Callable[[], None]) -> None:
        """Set the parameters of all modules to the optimizer's if ``distributed``, else to the raw ones.

        The first swap in each direction calls ``exchange_by_name``, megatron-core's slower method, which also sets
        ``__fsdp_param__`` and other attributes.
        """
        if self.is_param_fsdp_distributed == distributed:
            return
        if self._parameter_swap is not None:
            if self._parameter_swap.holds(not distributed):
                self._parameter_swap.to(distributed)
                self.__dict__["is_param_fsdp_distributed"] = distributed  # bypasses Module.__setattr__, which is slow
                return
            self._parameter_swap = None
        exchange_by_name()
        if not distributed:  # megatron-core has swapped in both directions
            optimizers = dict(self.param_and_grad_buffer.optimizer_named_parameters)
            self._parameter_swap = ParameterSwap(self.module, self.raw_param, optimizers)
