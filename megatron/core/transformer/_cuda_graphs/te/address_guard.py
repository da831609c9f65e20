"""Guards what the graphs of layers use at fixed addresses; parameters under Megatron-FSDP have guards of their own."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..engine.addresses import AddressGuard, places_of

_ADVICE = (
    "Parameters, main gradients, buffers and static inputs must not be replaced, moved or offloaded while there are "
    "graphs: call delete_cuda_graphs first, and create_cudagraphs afterwards."
)


@dataclass(frozen=True)
class GuardedLayer:
    """A layer that was just captured.

    Attributes:
        name: Its name in errors.
        layer: The layer.
        parameters: Whether its parameters are to be guarded.
        main_grads: Whether its graphs add to ``param.main_grad`` (``--gradient-accumulation-fusion``).
    """

    name: str
    layer: torch.nn.Module
    parameters: bool
    main_grads: bool


def guard_layer(guarded: GuardedLayer, inputs: Iterable[tuple[str, torch.Tensor]]) -> AddressGuard | None:
    """Return a guard of the tensors that the graphs of a layer use at fixed addresses; None if there are none.

    Args:
        guarded: The layer.
        inputs: Its static inputs, each after its name.
    """
    params = places_of(guarded.layer, "_parameters") if guarded.parameters else []
    names = [f"{place.name} of {guarded.name}" for place in params]
    writing = params if guarded.main_grads else []
    names += [f"the main gradient of {name}" for name in names[: len(writing)]]
    # Some modules make a buffer only when they first need it.
    buffers = [place for place in places_of(guarded.layer, "_buffers") if place.tensor is not None]
    names += [f"the buffer {place.name} of {guarded.name}" for place in buffers]
    given = list(inputs)
    names += [f"the static input {name}" for name, _ in given]
    static = [tensor for _, tensor in given]
    if not names:
        return None

    def tensors() -> list[torch.Tensor | None]:
        return [
            *[owner.get(key) for _, owner, key in params],
            *[getattr(owner.get(key), "main_grad", None) for _, owner, key in writing],
            *[owner.get(key) for _, owner, key in buffers],
            *static,
        ]

    return AddressGuard(tensors, names.__getitem__, _ADVICE)
