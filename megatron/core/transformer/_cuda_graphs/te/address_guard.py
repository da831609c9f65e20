"""Guards what the graphs of layers use at fixed addresses; parameters under Megatron-FSDP have guards of their own."""

from collections.abc import Sequence

import torch

from ..engine.addresses import AddressGuard, places_of

_ADVICE = (
    "Parameters, main gradients, buffers and static inputs must not be replaced, moved or offloaded while there are "
    "graphs: call delete_cuda_graphs first, and create_cudagraphs afterwards."
)


def guard_layer(
    name: str,
    layer: torch.nn.Module,
    inputs: Sequence[tuple[str, torch.Tensor]],
    *,
    parameters: bool = True,
    main_grads: bool = False,
) -> AddressGuard | None:
    """Return a guard of the tensors that the graphs of ``layer`` use at fixed addresses; None if there are none.

    Args:
        inputs: Its static inputs, each after its name.
        main_grads: Whether its graphs add to ``param.main_grad`` (``--gradient-accumulation-fusion``).
    """
    params = places_of(layer, "_parameters") if parameters else []
    names = [f"{place.name} of {name}" for place in params]
    writing = params if main_grads else []
    names += [f"the main gradient of {param}" for param in names[: len(writing)]]
    # Some modules make a buffer only when they first need it.
    buffers = [place for place in places_of(layer, "_buffers") if place.tensor is not None]
    names += [f"the buffer {place.name} of {name}" for place in buffers]
    names += [f"the static input {each} of {name}" for each, _ in inputs]
    static = [tensor for _, tensor in inputs]
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
