"""What clipping asks each gradient, answered once."""

from typing import Any

import torch

from .kept_gradients import KeptGradients


class ClippedGradients(KeptGradients):
    """Gradients for ``clip_grad_by_total_norm_fp32``.

    Attributes:
        params: What it takes for the parameters that have one.
    """

    def __init__(self, grads: list[Any], name: str):
        """Keep ``grads``, which parameters have as their attribute ``name``; None where one has none."""
        super().__init__(grads)
        pairs = zip(grads, self.local, strict=True)
        self.params = [_Parameter(name, _Gradient(grad, local)) for grad, local in pairs if local is not None]


class _Gradient:
    """A gradient whose type and local tensor, detached, are known."""

    def __init__(self, grad: torch.Tensor, local: torch.Tensor):
        self._type, self.dtype, self._detached = grad.type(), grad.dtype, local

    def type(self) -> str:
        return self._type

    def detach(self) -> torch.Tensor:
        return self._detached


class _Parameter:
    """Something that has a gradient."""

    def __init__(self, name: str, grad: _Gradient):
        setattr(self, name, grad)
