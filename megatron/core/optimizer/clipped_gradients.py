"""What clipping asks each gradient, answered once."""

from operator import is_
from typing import Any

import torch

from .local_shards import local_tensor


class ClippedGradients:
    """The gradients of some parameters, for ``clip_grad_by_total_norm_fp32``.

    Attributes:
        params: What it takes for the parameters that have a gradient.
    """

    def __init__(self, grads: list[torch.Tensor | None], name: str):
        """Keep gradients.

        Args:
            grads: The gradient of each parameter, a ``DTensor`` or an ordinary tensor.
            name: The attribute of a parameter that holds it: ``grad`` or ``decoupled_grad``.
        """
        self._grads = grads
        self._locals = [local_tensor(grad) for grad in grads]
        self.params = [_Parameter(name, _Gradient(grad)) for grad in grads if grad is not None]

    def are(self, grads: list[torch.Tensor | None]) -> bool:
        """Whether ``grads`` are those that are kept."""
        return (
            len(grads) == len(self._grads)
            and all(map(is_, grads, self._grads))
            and all(map(is_, map(local_tensor, grads), self._locals))
        )


class _Gradient:
    """A gradient whose type and local tensor are known."""

    def __init__(self, grad: torch.Tensor):
        self._type, self.dtype = grad.type(), grad.dtype
        self._detached = local_tensor(grad).detach()

    def type(self) -> str:
        return self._type

    def detach(self) -> torch.Tensor:
        return self._detached


class _Parameter:
    """Something that has a gradient."""

    def __init__(self, name: str, grad: _Gradient):
        setattr(self, name, grad)
