"""Guards the parameters of graphed layers without Megatron-FSDP, which has guards of its own."""

import torch

from ..engine.addresses import AddressGuard

_ADVICE = (
    "Parameters and main gradients must not be replaced, moved or offloaded while there are graphs: call "
    "delete_cuda_graphs first, and create_cudagraphs afterwards."
)


def guard_parameters(name: str, layer: torch.nn.Module, *, writes_main_grads: bool) -> AddressGuard:
    """Return a guard of the tensors that the graphs of ``layer`` use at fixed addresses.

    Args:
        name: The layer's name in errors.
        layer: The layer, just captured.
        writes_main_grads: Whether its graphs add to ``param.main_grad`` (``--gradient-accumulation-fusion``).
    """
    places: list[tuple[torch.nn.Module, str]] = []
    names: list[str] = []
    for prefix, module in layer.named_modules():
        for own in module._parameters:
            places.append((module, own))
            names.append(f"{prefix}.{own}" if prefix else own)
    if writes_main_grads:
        names += [f"the main gradient of {parameter}" for parameter in names]

    def tensors() -> list[torch.Tensor | None]:
        params = [module._parameters[own] for module, own in places]
        return [*params, *(getattr(param, "main_grad", None) for param in params)] if writes_main_grads else [*params]

    return AddressGuard(tensors, lambda i: f"{names[i]} of {name}", _ADVICE)
