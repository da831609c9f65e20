"""The distributed optimizer, whose step under Megatron-FSDP costs the host less."""

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from types import MethodType
from typing import Any

import torch

from megatron.core.optimizer.empty_shards import state_of_every_parameter
from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_experts_in_state_dict
from megatron_fsdp_cuda_graphs.overlay import extend

from ..distributed.fsdp.global_names import by_global_name
from ..distributed.fsdp.src.megatron_fsdp.optimizer_gradients import gradient_name
from . import clip_grads
from .clip_grads import count_zeros_fp32
from .counted_ranks import CountedRanks
from .local_shards import KeptGradients, LocalShards, gradients_of, local_tensor, stay
from .repeated_work import RepeatedWork

_upstream: Any = extend(__name__)

LOSS_SCALE = "grad_scaler"  # in checkpoints
GROUPS = "param_to_group_meta"  # in checkpoints: the options of each parameter's group


class DistributedOptimizer(_upstream.DistributedOptimizer):
    """megatron-core's ``DistributedOptimizer``, which under Megatron-FSDP steps on the local shards of parameters.

    Its checkpoints hold the states of every parameter on every rank, those without an element on a rank too.
    """

    _local_shards: LocalShards | None = None
    _kept: KeptGradients | None = None
    _clipping: RepeatedWork | None = None
    _clips_beside: Any = None  # the graphs of the whole model that the gradients come from

    def get_loss_scale(self) -> torch.Tensor:
        """Return the loss scale, float32, shape (1,); see megatron-core.

        Without a scaler it is 1, and its ``item`` does not wait for the device: training reads it in each step.
        """
        scale: torch.Tensor = super().get_loss_scale()
        if self.grad_scaler is None and "item" not in vars(scale):
            scale.__dict__["item"] = MethodType(_item_of_one, scale)
        return scale

    def _gradient_name(self) -> str:
        """The attribute that Megatron-FSDP puts a parameter's gradient in, whatever else the precision follows from."""
        return gradient_name(self.config.use_precision_aware_optimizer)

    def clip_grad_norm(self, clip_grad: float) -> Any:
        """Return the norm of the gradients, and clip them; see megatron-core.

        Beside graphs of the whole model's passes that is a graph too, as long as gradients stay where they are.
        """
        clip = super().clip_grad_norm
        passes = self._whole_model_passes()
        self._kept = kept = None if passes is None else self._kept_gradients()
        if kept is None:
            return clip(clip_grad)
        if self._clipping is None or passes is not self._clips_beside:
            self._clipping = RepeatedWork("The norm of gradients and their clipping")
            self._clips_beside = passes
            passes.on_forget.append(self._free_clipping)
        return self._clipping.run([kept, clip_grad, *kept.addresses()], lambda: clip(clip_grad))

    def _free_clipping(self) -> None:
        """Free the graph of the norm, before the communicators of its collectives."""
        if self._clipping is not None:
            self._clipping.reset()
        self._clipping = self._clips_beside = None

    def _whole_model_passes(self) -> Any:
        """Return the graphs of the whole model's passes, if clipping can be captured beside them; None if not.

        It cannot within a capture, where the host waits for the norm, or where one optimizer or one chunk is not all.
        """
        if not self.ddp_config.use_megatron_fsdp or len(self.model_chunks) != 1 or self.is_stub_optimizer:
            return None
        if clip_grads.multi_tensor_scale_tensor_impl is None or torch.cuda.is_current_stream_capturing():
            return None
        return self.model_chunks[0].module.graphs_of_model

    def _kept_gradients(self) -> KeptGradients | None:
        """Return the gradients, if they stay from step to step and have one norm."""
        params = self.get_parameters()
        grads = gradients_of(params, self._gradient_name())
        if self._kept is not None and self._kept.are(grads):
            return self._kept
        from .optimizer import _get_param_grad_norm_group

        one_norm = not any(map(_get_param_grad_norm_group, params))  # others are Python values that a replay leaves out
        return KeptGradients(grads) if one_norm and stay(grads) else None

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        """Return the gradients that the loss scale is divided out of, as local tensors; see megatron-core.

        Under Megatron-FSDP a parameter of which this rank has no shard has no gradient here.
        """
        if self.ddp_config.use_megatron_fsdp:
            present = [grad for grad in gradients_of(self.get_parameters(), self._gradient_name()) if grad is not None]
            return [local_tensor(grad) for grad in present]
        return super()._collect_main_grad_data_for_unscaling()

    def get_grad_stats_parallel_group(self) -> torch.distributed.ProcessGroup:
        """Return the group over which the gradients' norm is summed, and infinities are looked for; see megatron-core.

        The ranks of a model must call it first at the same time.
        """
        if not self.ddp_config.use_megatron_fsdp:
            return super().get_grad_stats_parallel_group()
        return self._ranks.group

    @cached_property
    def _ranks(self) -> CountedRanks:
        return CountedRanks(self.model_chunks, super().get_grad_stats_parallel_group())

    def _filter_grads_for_norm(self, params: list[Any], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """Return the gradients of those of ``params`` that count on this rank; see megatron-core."""
        if self.ddp_config.use_megatron_fsdp:
            params = self._ranks.counted(params)
        return super()._filter_grads_for_norm(params, *args, **kwargs)

    def count_zeros(self) -> float:
        """Return how many elements of the gradients are zero; see megatron-core."""
        if not self.ddp_config.use_megatron_fsdp or not self._ranks.replicated:
            return super().count_zeros()
        return count_zeros_fp32(
            self._ranks.counted(self.get_parameters()),
            grad_stats_parallel_group=self._ranks.group,
            use_decoupled_grad=self.config.use_precision_aware_optimizer,
        )

    def offload_to_cpu(self) -> None:
        """Move the optimizer's states to the host; see megatron-core."""
        self._local_shards = None  # it keeps states on the device
        super().offload_to_cpu()

    def sharded_param_state_fsdp_dtensor(self, is_loading: bool = False) -> dict[str, Any]:
        """Return the states and the groups of the parameters, both by parameter name, and the loss scale.

        Saving and loading run collectives for each state, so every rank has to have the same ones. megatron-core leaves
        the loss scale out, and a resumed run would begin with --initial-loss-scale again. Learning rates are numbers,
        also where --optimizer-cuda-graph has tensors.
        """
        saved: dict[str, Any] = super().sharded_param_state_fsdp_dtensor(is_loading)
        if not self.is_stub_optimizer:
            saved[GROUPS] = {name: group | {"lr": float(group["lr"])} for name, group in saved[GROUPS].items()}
            saved["state"] = state_of_every_parameter(self.optimizer, saved["state"], self._param_name)
            if self.grad_scaler is not None and (scale := self.grad_scaler.state_dict()):
                saved[LOSS_SCALE] = scale
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the states and the loss scale of a checkpoint; see megatron-core.

        Whether steps can be captured, and learning rates are tensors for it, is this run's and not the checkpoint's.
        """
        if self.ddp_config.use_megatron_fsdp:
            if LOSS_SCALE in state_dict:
                self.grad_scaler.load_state_dict(state_dict.pop(LOSS_SCALE))
            if state_dict.get(GROUPS):
                state_dict[GROUPS] = self._as_own(state_dict[GROUPS])
        super().load_state_dict(state_dict)

    def _as_own(self, groups: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the options of a checkpoint's groups for an optimizer of this run's kind."""
        own = self.optimizer.param_groups[0]
        is_tensor = isinstance(own["lr"], torch.Tensor)
        rates = {float(group["lr"]) for group in groups.values()}
        own_rates = {rate: torch.full_like(own["lr"], rate) if is_tensor else rate for rate in rates}
        captured = {"capturable": own["capturable"]} if "capturable" in own else {}
        return {name: group | captured | {"lr": own_rates[float(group["lr"])]} for name, group in groups.items()}

    def _copy_model_params_to_main_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Take over the model's parameters after a checkpoint without the optimizer's states; see megatron-core.

        Under Megatron-FSDP a checkpoint is read into the optimizer's parameters, and the model's are copies of these.
        """
        if not self.ddp_config.use_megatron_fsdp or isinstance(self.optimizer, _upstream.HybridDeviceOptimizer):
            super()._copy_model_params_to_main_params(state_dict)

    def _param_name(self, param: torch.nn.Parameter) -> str:
        """Return a parameter's name in checkpoints; see megatron-core.

        Under Megatron-FSDP it is the one in the whole model, also where this rank has some of its layers only.
        """
        if self.ddp_config.use_megatron_fsdp and not hasattr(self, "param_to_name"):
            params = by_global_name(self.model_chunks, [dict(chunk.named_parameters()) for chunk in self.model_chunks])
            params = handle_experts_in_state_dict(params, self.model_chunks[0].config.num_moe_experts)
            self.param_to_name = {param: name for name, param in params.items()}
        return super()._param_name(param)

    def step_with_ready_grads(self) -> bool:
        """Step with gradients that are ready, and start to gather parameters; see megatron-core."""
        if not (self.is_stub_optimizer or self.ddp_config.use_megatron_fsdp or self.optimizer.state):
            impls = {getattr(chunk.config, "cuda_graph_impl", "none") for chunk in self.model_chunks}
            if impls != {"none"}:  # see Megatron-FSDP's ``update_main_grads``
                torch.cuda.empty_cache()
        with self._on_local_shards():
            return super().step_with_ready_grads()

    def _on_local_shards(self) -> AbstractContextManager[None]:
        """Return a context in which the optimizer has local shards, if that makes no difference."""
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
    """The value of a tensor that was made as 1: known on the host unless it was changed."""
    return torch.Tensor.item(scale) if scale._version else 1.0
