"""Gradients that are the same objects in every step."""

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch

_LOCAL, _GRAD, _ADDRESS = attrgetter("_local_tensor"), attrgetter("grad"), methodcaller("data_ptr")


class KeptGradients:
    """Gradients of parameters, ``DTensor``s, and their local tensors.

    Attributes:
        local: For each gradient a tensor with the memory that its local tensor had; None where a parameter has none.
    """

    def __init__(self, grads: list[Any]):
        """Keep ``grads``, for which ``stay`` holds; None where a parameter has none."""
        self._grads = grads
        self._present = [grad for grad in grads if grad is not None]
        self._present_local: list[torch.Tensor] = list(map(_LOCAL, self._present))
        self.local = [None if grad is None else grad._local_tensor.detach() for grad in grads]
        self._memory = [local for local in self.local if local is not None]

    def are(self, grads: list[Any]) -> bool:
        """Whether ``grads`` are the same objects, with the same local tensors, which have the same memory.

        That may move as ``UntypedStorage.resize_`` moves it.
        """
        return (
            same(grads, self._grads)
            and same(list(map(_LOCAL, self._present)), self._present_local)
            and self.addresses() == list(map(_ADDRESS, self._memory))
        )

    def addresses(self) -> list[int]:
        """Return where each gradient is now."""
        return list(map(_ADDRESS, self._present_local))


def same(these: list[Any], those: list[Any]) -> bool:
    """Whether both lists hold the same objects in the same order."""
    return len(these) == len(those) and all(map(is_, these, those))


def local_tensor(value: Any) -> Any:
    """The local tensor of a ``DTensor``; anything else as it is."""
    return getattr(value, "_local_tensor", value)


def gradients_of(params: Sequence[Any], name: str) -> list[Any]:
    """Return the gradient of each parameter, or None.

    Args:
        name: Their attribute that has it: ``grad``, or ``decoupled_grad``, which a parameter may lack.
    """
    return list(map(_GRAD, params)) if name == "grad" else [getattr(param, name, None) for param in params]


def stay(grads: Iterable[Any]) -> bool:
    """Whether these gradients are the same objects in the next step, so that whoever keeps them keeps no more memory.

    Megatron-FSDP marks those that do.
    """
    return all(getattr(grad, "stays", False) for grad in grads if grad is not None)
