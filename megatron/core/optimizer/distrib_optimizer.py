"""Extend the distributed optimizer under Megatron-FSDP: fewer host operations per step, and complete checkpoints."""

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.optimizer.empty_shards import state_of_every_parameter
from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_experts_in_state_dict
from megatron_fsdp_cuda_graphs.overlay import extend

from ..distributed.fsdp.global_names import by_global_name
from ..distributed.fsdp.src.megatron_fsdp.optimizer_gradients import gradient_name
from . import clip_grads
from .local_shards import KeptGradients, LocalShards, gradients_of, local_tensor, stay
from .repeated_work import RepeatedWork

_upstream: Any = extend(__name__)

LOSS_SCALE = "grad_scaler"  # key in checkpoints


class DistributedOptimizer(_upstream.DistributedOptimizer):
    """Extends megatron-core's ``DistributedOptimizer`` to support graphs, and empty shards under Megatron-FSDP."""

    _local_shards: LocalShards | None = None
    _kept: KeptGradients | None = None
    _on_host: tuple[tuple[dict[str, Any], str], ...] = ()  # offloaded states, each with its name

    def get_loss_scale(self) -> torch.Tensor:
        """Return the loss scale, float32, shape (1,); see megatron-core.

        Without a scaler, the scale is 1, and its ``item``, which the training loop calls, does not synchronize.
        """
        scale: torch.Tensor = super().get_loss_scale()
        if self.grad_scaler is None and "item" not in vars(scale):
            scale.__dict__["item"] = MethodType(_item_of_one, scale)
        return scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; see megatron-core.

        Raises:
            ValueError: A parameter was frozen after the optimizer was created. Megatron-FSDP would still train it.
        """
        if self.ddp_config.use_megatron_fsdp and not self.is_stub_optimizer:
            for param in self.get_parameters():
                if not (param.requires_grad and param.orig_param.requires_grad):  # the model may have either
                    name = param._megatron_fsdp_model.param_to_name[param.orig_param]
                    raise ValueError(
                        f"requires_grad of {name} is off, but Megatron-FSDP would still train it: "
                        "freeze parameters before wrapping the model, or set their learning rate to 0"
                    )
        super().zero_grad(set_to_none)

    def _gradients(self) -> list[Any]:
        """Return each parameter's gradient, a ``DTensor``; None if this rank has no shard of the parameter."""
        return gradients_of(self.get_parameters(), gradient_name(self.config.use_precision_aware_optimizer))

    def clip_grad_norm(self, clip_grad: float) -> Any:
        """Clip the gradients and return their norm; see megatron-core.

        With graphs of the whole model, a graph computes the norm and clips.
        """
        clip = super().clip_grad_norm
        passes = self._whole_model_passes()
        self._kept = kept = None if passes is None else self._kept_gradients()
        if kept is None:
            return clip(clip_grad)
        clipping = passes.repeated.setdefault(self, RepeatedWork("Gradient clipping"))
        return clipping.run([kept, clip_grad, *kept.addresses()], lambda: clip(clip_grad))

    def _whole_model_passes(self) -> Any:
        """Return the graphs of the whole model if clipping can be captured, else None.

        Clipping is not captured if it synchronizes, inside another capture, or for several model chunks.
        """
        if not self.ddp_config.use_megatron_fsdp or len(self.model_chunks) != 1 or self.is_stub_optimizer:
            return None
        if clip_grads.multi_tensor_scale_tensor_impl is None or torch.cuda.is_current_stream_capturing():
            return None
        return self.model_chunks[0].module.graphs.whole_passes

    def _kept_gradients(self) -> KeptGradients | None:
        """Return a snapshot of the gradients; None if steps allocate new ones or parameter groups have separate norms.

        Norms of groups are Python values, which a replay would not update.
        """
        grads = self._gradients()
        if self._kept is not None and self._kept.are(grads):
            return self._kept
        from .optimizer import _get_param_grad_norm_group

        one_norm = not any(map(_get_param_grad_norm_group, self.get_parameters()))
        return KeptGradients(grads) if one_norm and stay(grads) else None

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        """Return the gradients to divide by the loss scale, as local tensors; see megatron-core.

        Under Megatron-FSDP, parameters without a shard on this rank have no gradient.
        """
        if self.ddp_config.use_megatron_fsdp:
            return [local_tensor(grad) for grad in self._gradients() if grad is not None]
        return super()._collect_main_grad_data_for_unscaling()

    def get_grad_stats_parallel_group(self) -> dist.ProcessGroup:
        """Return the group over which the gradient norm is summed and infinities are detected; see megatron-core.

        megatron-core's group misses shards if HSDP also shards optimizer states across replicas. With ``no_shard``, it
        misses the experts of other ranks, so ranks would clip their copies of a weight by different norms.
        """
        if self.ddp_config.use_megatron_fsdp and (self._is_unsharded() or self._dist_index().hsdp_outer_dp_shard):
            return dist.group.WORLD
        return super().get_grad_stats_parallel_group()

    def _dist_index(self) -> Any:
        return self.model_chunks[0].module.dist_index

    def _is_unsharded(self) -> bool:
        config = self.ddp_config
        return bool(config.use_megatron_fsdp and config.data_parallel_sharding_strategy == "no_shard")

    def _counted(self, params: list[Any]) -> list[Any]:
        """Return the parameters whose gradients this rank includes in the norm and in the count of zeros.

        Without sharding, only the first replica includes them.
        """
        if not self._is_unsharded():
            return params
        first = {expert: dist.get_rank(self._dist_index().get_dp_group(expert)) == 0 for expert in (False, True)}
        return [param for param in params if first[param.orig_param in self._expert_params]]

    @cached_property
    def _expert_params(self) -> set[Any]:
        groups = [g for chunk in self.model_chunks for g in chunk.module.param_and_grad_buffer.parameter_groups]
        return {param for group in groups if group.is_expert_param for param in group.params}

    def _filter_grads_for_norm(self, params: list[Any], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """Return the gradients to include in this rank's norm; see megatron-core."""
        return super()._filter_grads_for_norm(self._counted(params), *args, **kwargs)

    def count_zeros(self) -> float:
        """Return the number of gradient elements that are zero; see megatron-core."""
        if not self._is_unsharded():
            return super().count_zeros()
        params, decoupled = self._counted(self.get_parameters()), self.config.use_precision_aware_optimizer
        return clip_grads.count_zeros_fp32(params, self.get_grad_stats_parallel_group(), decoupled)

    def offload_to_cpu(self) -> None:
        """Move the optimizer's states and weights to the host; see megatron-core.

        Under Megatron-FSDP, megatron-core would replace the weights, and later updates would not reach the model.
        """
        self._local_shards = None  # holds states on the device
        if not self.ddp_config.use_megatron_fsdp:
            super().offload_to_cpu()
            return
        torch.cuda.synchronize()  # the caller's stream may not be the training stream
        for state in () if self.is_stub_optimizer else self.optimizer.state.values():
            self._on_host += tuple((state, name) for name, value in state.items() if getattr(value, "is_cuda", False))
        for state, name in self._on_host:
            state[name] = state[name].cpu()
        for chunk in self.model_chunks:
            chunk.param_and_grad_buffer.offload_main_weights()
        torch.cuda.empty_cache()

    def restore_from_cpu(self) -> None:
        """Move the optimizer's states and weights back to the device; see megatron-core."""
        if not self.ddp_config.use_megatron_fsdp:
            super().restore_from_cpu()
            return
        for state, name in self._on_host:  # other states (step counts, for example) are always on the host
            state[name] = state[name].cuda()
        self._on_host = ()
        for chunk in self.model_chunks:
            chunk.param_and_grad_buffer.restore_main_weights()
        torch.cuda.synchronize()

    def sharded_param_state_fsdp_dtensor(self, is_loading: bool = False) -> dict[str, Any]:
        """Return the parameters' states and groups, both keyed by parameter name, and the loss scale.

        megatron-core omits the loss scale and the states of empty shards, although saving and loading run collectives
        for each state.
        """
        saved: dict[str, Any] = super().sharded_param_state_fsdp_dtensor(is_loading)
        if not self.is_stub_optimizer:
            saved["state"] = state_of_every_parameter(self.optimizer, saved["state"], self._param_name)
            if self.grad_scaler is not None and (scale := self.grad_scaler.state_dict()):
                saved[LOSS_SCALE] = scale
        return saved

    def _init_optimizer_states_with_dummy_values(self) -> None:
        """Create zero states for a checkpoint, unless there are states; see megatron-core.

        megatron-core creates them by a step with zero gradients, even if there is no checkpoint to load. This method
        prevents that step from decaying weights or advancing step counts.
        """
        if any(self.optimizer.state.values()):
            return
        groups = self.optimizer.param_groups
        decays = [group["weight_decay"] for group in groups]
        for group in groups:
            group["weight_decay"] = 0.0
        super()._init_optimizer_states_with_dummy_values()
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay
        for counted in (*groups, *self.optimizer.state.values()):
            if "step" in counted:
                counted["step"] *= 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states and the loss scale of a checkpoint; see megatron-core."""
        if self.ddp_config.use_megatron_fsdp and LOSS_SCALE in state_dict:
            self.grad_scaler.load_state_dict(state_dict.pop(LOSS_SCALE))
        super().load_state_dict(state_dict)

    def _copy_model_params_to_main_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Copy the model's parameters to the optimizer's after loading only weights; see megatron-core.

        Under Megatron-FSDP this does nothing: checkpoints are loaded into the optimizer's parameters.
        """
        if not self.ddp_config.use_megatron_fsdp or isinstance(self.optimizer, _upstream.HybridDeviceOptimizer):
            super()._copy_model_params_to_main_params(state_dict)

    def _param_name(self, param: torch.nn.Parameter) -> str:
        """Return a parameter's name in checkpoints; see megatron-core.

        Under Megatron-FSDP, layer numbers are global, not local to the pipeline stage.
        """
        if self.ddp_config.use_megatron_fsdp and not hasattr(self, "param_to_name"):
            params = by_global_name(self.model_chunks, [dict(chunk.named_parameters()) for chunk in self.model_chunks])
            params = handle_experts_in_state_dict(params, self.model_chunks[0].config.num_moe_experts)
            self.param_to_name = {param: name for name, param in params.items()}
        return super()._param_name(param)

    def step_with_ready_grads(self) -> bool:
        """Run the optimizer's step and start gathering parameters; see megatron-core."""
        if not (self.is_stub_optimizer or self.ddp_config.use_megatron_fsdp or self.optimizer.state):
            impls = {getattr(chunk.config, "cuda_graph_impl", "none") for chunk in self.model_chunks}
            if impls != {"none"}:  # see Megatron-FSDP's ``update_main_grads``
                torch.cuda.empty_cache()
        with self._on_local_shards():
            return super().step_with_ready_grads()

    def _on_local_shards(self) -> AbstractContextManager[None]:
        """Return a context in which the optimizer steps on local shards, or a null context if results could differ."""
        if self.is_stub_optimizer or not self.ddp_config.use_megatron_fsdp:
            return nullcontext()
        if self._local_shards is None or not self._local_shards.current():
            kinds = (_upstream.Adam, torch.optim.Adam, torch.optim.AdamW)
            eligible = LocalShards.eligible(self.optimizer, kinds)
            self._local_shards = LocalShards(self.optimizer) if eligible else None
            if self._local_shards is None or not self._local_shards.current():
                return nullcontext()
        return self._local_shards.in_place()


def _item_of_one(scale: torch.Tensor) -> float:
    """Return ``scale.item()``, without synchronizing while ``scale`` has its initial value 1."""
    return torch.Tensor.item(scale) if scale._version else 1.0
