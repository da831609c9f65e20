"""Gradients of parameters that are the same objects in every step."""

from collections.abc import Callable, Iterable
from itertools import compress
from operator import attrgetter, is_
from typing import Any

import torch

_LOCAL = attrgetter("_local_tensor")


class KeptGradients:
    """The gradients of some parameters, ``DTensor``s that stay, and their local tensors.

    Attributes:
        grads: The gradient of each parameter, or None.
        local: The local tensor of each gradient, or None.
    """

    def __init__(self, params: Iterable[Any], name: str):
        """Look at ``params``.

        Args:
            params: The parameters.
            name: Their attribute with a gradient: ``grad`` or ``decoupled_grad``, which a parameter may lack.
        """
        self._params, self._read = list(params), gradients_of(name)
        self.grads = self._read(self._params)
        self._present = [grad for grad in self.grads if grad is not None]
        self._local_present = [local_tensor(grad) for grad in self._present]
        self.local = [None if grad is None else local_tensor(grad) for grad in self.grads]

    def stay(self) -> bool:
        """Whether whoever keeps the gradients keeps no more memory: Megatron-FSDP marks those that it keeps itself."""
        return all(getattr(grad, "stays", False) for grad in self._present)

    def unchanged(self, params: list[Any]) -> bool:
        """Whether ``params`` are the parameters that were looked at, with the same gradients in the same tensors."""
        return (
            _same(params, self._params)
            and _same(self._read(params), self.grads)
            and all(map(is_, map(_LOCAL, self._present), self._local_present))
        )
