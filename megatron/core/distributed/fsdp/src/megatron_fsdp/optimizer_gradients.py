"""The gradients that the optimizer reads, at addresses that do not change between steps."""

from typing import Any

import torch

from .planned_copies import Placement, PlannedCopies


class OptimizerGradients:
    """The gradient of each parameter of an optimizer: a shard of the main gradients, or that shard in another dtype.

    megatron-core makes these views anew in every step, and casts each shard into new memory. With CUDA graphs it leaves
    them attached to the parameters between steps, so they need not be made more than once.
    """

    def __init__(self, buffer: Any):
        """Keep the gradients that ``buffer``, a ``ParamAndGradBuffer``, has attached to its parameters."""
        self._name = "decoupled_grad" if buffer.use_decoupled_grad else "grad"
        self._params = buffer.optimizer_named_parameters
        self._attached: list[tuple[torch.nn.Parameter, Any]] = []
        self._locals: list[tuple[Any, torch.Tensor]] = []
        casts, buffers = [], []
        sharded = buffer.bucketing_policy.data_parallel_sharding_strategy != "no_shard"
        for name, param in self._params:
            main_grads = buffer.parameter_groups[buffer.param_to_param_group[param.orig_param]].main_grad_buffer
            if main_grads is None:
                continue
            buffers.append(main_grads)
            grad = buffer.dist_main_grad[name]
            local = grad._local_tensor
            self._attached.append((param, grad if local.numel() else None))
            self._locals.append((grad, local))
            if local.dtype != main_grads.data.dtype:
                shard = main_grads.get_item(main_grads.param_idx[param.orig_param], only_shard=sharded)
                casts.append((local.view(-1), shard))
        self._casts = PlannedCopies(casts)
        self._placement = Placement(dict.fromkeys(buffers))

    def unmoved(self, buffer: Any) -> bool:
        """Whether parameters, main gradients and the views of them are those that were kept."""
        return (
            self._params is buffer.optimizer_named_parameters
            and self._placement.unchanged()
            and all(grad._local_tensor is local for grad, local in self._locals)
        )

    def update(self) -> None:
        """Let every parameter have its gradient, with the value that the main gradients have now."""
        self._casts.run()
        for param, grad in self._attached:
            if getattr(param, self._name, None) is not grad:
                setattr(param, self._name, grad)
