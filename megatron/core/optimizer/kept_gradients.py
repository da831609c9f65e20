"""Gradients that are the same objects in every step."""

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch

_LOCAL, _GRAD, _ADDRESS = attrgetter("_local_tensor"), attrgetter("grad"), methodcaller("data_ptr")


class KeptGradients:
    """Gradients of parameters, ``DTensor``s, and their local tensors.

    Attributes:
        local: The local tensor of each gradient; None where a parameter has none.
    """

    def __init__(self, grads: list[Any]):
        """Keep ``grads``, for which ``stay`` holds; None where a parameter has none."""
        self._grads = grads
        self._present = [grad for grad in grads if grad is not None]
        self._present_local: list[torch.Tensor] = [grad._local_tensor for grad in self._present]
        self._aliases = [local.detach() for local in self._present_local]  # of the memory that they have now
        self.local: list[torch.Tensor | None] = [None if grad is None else grad._local_tensor for grad in grads]

    def are(self, grads: list[Any]) -> bool:
        """Whether ``grads`` are the same objects, with the same local tensors, which have the same memory.

        That may move as ``UntypedStorage.resize_`` moves it.
        """
        return (
            len(grads) == len(self._grads)
            and all(map(is_, grads, self._grads))
            and all(map(is_, map(_LOCAL, self._present), self._present_local))
            and self.addresses() == list(map(_ADDRESS, self._aliases))
        )

    def addresses(self) -> list[int]:
        """Return where each gradient is now."""
        return list(map(_ADDRESS, self._present_local))


def gradients_of(params: Sequence[Any], name: str) -> list[Any]:
    """Return the gradient of each parameter, or None.

    Args:
        params: The parameters.
        name: Their attribute that has it: ``grad``, or ``decoupled_grad``, which a parameter may lack.
    """
    return list(map(_GRAD, params)) if name == "grad" else [getattr(param, name, None) for param in params]


def stay(grads: Iterable[Any]) -> bool:
    """Whether these gradients are the same objects in the next step, so that whoever keeps them keeps no more memory.

    Megatron-FSDP marks those that do.
    """
    return all(getattr(grad, "stays", False) for grad in grads if grad is not None)
