"""The gradients that count in the gradient norm, without asking each parameter in every step whether its own does."""

from itertools import compress
from typing import Any

import torch

from .kept_gradients import gradients_of, local_tensor, same


class CountedGradients:
    """Which parameters' gradients count.

    That depends on what a parameter is (shared, a duplicate on tensor-parallel ranks, of a group with a norm of its
    own), which is settled when the model is built, and on whether it has a gradient.
    """

    def __init__(self, params: list[Any], name: str, counted: list[torch.Tensor]):
        """Note which gradients count.

        Args:
            params: All parameters of the optimizer.
            name: The attribute that holds a parameter's gradient, a ``DTensor`` or an ordinary tensor.
            counted: The gradients that count, local tensors.
        """
        self._params, self._name = params, name
        ids, grads = set(map(id, counted)), gradients_of(params, name)
        self._present = [grad is not None for grad in grads]
        self._counts = [id(local_tensor(grad)) in ids for grad in grads]

    def of(self, params: list[Any]) -> list[torch.Tensor] | None:
        """Return the local tensors of the gradients that count; None if parameters are others or lack gradients."""
        if not same(params, self._params):
            return None
        grads = gradients_of(params, self._name)
        if [grad is not None for grad in grads] != self._present:
            return None
        return [local_tensor(grad) for grad in compress(grads, self._counts)]
