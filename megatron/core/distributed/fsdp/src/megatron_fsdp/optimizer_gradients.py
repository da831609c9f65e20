"""The gradients that the optimizer reads, planned once."""

from operator import attrgetter, is_
from typing import Any

import torch

from .gradient_storages import GradientStorages
from .planned_copies import PlannedCopies

_LOCAL = attrgetter("_local_tensor")


def gradient_name(decoupled: bool) -> str:
    """Return the attribute that has the gradient of an optimizer's parameter; a decoupled one may differ in dtype."""
    return "decoupled_grad" if decoupled else "grad"


class OptimizerGradients:
    """The gradient of each parameter of an optimizer: a shard of the main gradients, or that shard in another dtype.

    megatron-core makes these views anew in every step, and casts each shard into new memory. Here the views are kept,
    and the casts have memory from ``update`` to ``release``. Parameters of which this rank has no shard have none.

    Attributes:
        in_place: Whether a graph may read the gradients, so that they stay attached and at their addresses.
    """

    def __init__(self, buffer: Any, *, in_place: bool):
        """Keep the gradients that ``buffer``, a ``ParamAndGradBuffer``, has attached to its parameters."""
        self.in_place = in_place
        self._name = gradient_name(buffer.use_decoupled_grad)
        self._params = buffer.optimizer_named_parameters
        self._attached: list[tuple[torch.nn.Parameter, Any]] = []
        buffers = []
        cast: list[tuple[Any, Any, torch.Tensor]] = []
        sharded = buffer.bucketing_policy.data_parallel_sharding_strategy != "no_shard"
        for name, param in self._params:
            main_grads = buffer.parameter_groups[buffer.param_to_param_group[param.orig_param]].main_grad_buffer
            if main_grads is None:
                continue
            buffers.append(main_grads)
            grad = buffer.dist_main_grad[name]
            if not grad._local_tensor.numel():  # the optimizer sees None
                continue
            grad.stays = True  # the same object in every step; see ``kept_gradients.stay``
            self._attached.append((param, grad))
            if grad._local_tensor.dtype != main_grads.data.dtype:
                shard = main_grads.get_item(main_grads.param_idx[param.orig_param], only_shard=sharded)
                cast.append((main_grads, grad, shard))
        self.storages = GradientStorages([] if in_place else [(bucket, grad) for bucket, grad, _ in cast])
        self._grads = [grad for _, grad in self._attached]
        self._locals = [grad._local_tensor for grad in self._grads]
        pairs = ((grad._local_tensor.view(-1), shard) for _, grad, shard in cast)
        self._casts = PlannedCopies(pairs, dict.fromkeys(buffers))
        self._are_attached = True

    def unmoved(self, buffer: Any) -> bool:
        """Whether parameters, main gradients and the views of them are those that were kept."""
        return (
            self._params is buffer.optimizer_named_parameters
            and self._casts.placement.unchanged()
            and all(map(is_, map(_LOCAL, self._grads), self._locals))
        )

    def update(self) -> None:
        """Let every parameter with a shard have its gradient, with the value that the main gradients have now."""
        self.in_place |= torch.cuda.is_current_stream_capturing()
        self.storages.allocate()
        self._casts.run()
        self._are_attached = True
        for param, grad in self._attached:
            if getattr(param, self._name, None) is not grad:
                setattr(param, self._name, grad)

    def release(self) -> None:
        """Take the gradients away until ``update``, and give their memory back, unless a graph may read them."""
        if self.in_place or not self._are_attached:
            return
        self._are_attached = False
        for param, _ in self._attached:
            setattr(param, self._name, None)
        self.storages.free()
