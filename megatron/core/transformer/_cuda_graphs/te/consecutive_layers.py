"""Which layers may be recorded in one graph."""

import os
from collections.abc import Sequence

import torch

from ..hooks import has_other_hooks

LAYERS_VARIABLE = "MEGATRON_CUDA_GRAPH_LAYERS_PER_GRAPH"
WHOLE_MODEL = "model"


def layers_per_graph() -> int | None:
    """The greatest number of layers in one graph, from the environment variable; None, its default, for all.

    Raises:
        ValueError: it is neither a positive integer nor ``model``.
    """
    given = os.environ.get(LAYERS_VARIABLE, "")
    if not given or given == WHOLE_MODEL:
        return None
    if not given.isdecimal() or int(given) < 1:
        raise ValueError(
            f"{LAYERS_VARIABLE} must be a positive number of layers, or {WHOLE_MODEL!r} for the whole model, got "
            f"{given!r}"
        )
    return int(given)


def whole_model_asked_for() -> bool:
    """Whether the environment variable asks for graphs of the whole model, not only of its layers."""
    return os.environ.get(LAYERS_VARIABLE) == WHOLE_MODEL


def consecutive(
    decoder: Sequence[torch.nn.Module],
    layers: Sequence[torch.nn.Module],
    sample_kwargs: Sequence[dict[str, torch.Tensor]],
) -> list[range]:
    """Divide ``layers`` into pieces of up to ``layers_per_graph()`` that follow each other; pieces of one are left out.

    Layers follow each other in ``decoder``, take the same keyword inputs, and have no hooks but Megatron-FSDP's, which
    are recorded with them.

    Args:
        decoder: All layers of the decoder, in order.
        layers: Those that are captured, in order.
        sample_kwargs: The static keyword inputs of each, for its first micro-batch.

    Returns:
        The indices in ``layers`` of each piece.
    """
    most = layers_per_graph() or len(layers)
    place = {layer: index for index, layer in enumerate(decoder)}
    pieces: list[range] = []
    start = 0
    for index in range(1, len(layers) + 1):
        follows = (
            index < len(layers)
            and index - start < most
            and all(layer in place and not has_other_hooks(layer) for layer in layers[index - 1 : index + 1])
            and place[layers[index]] == place[layers[index - 1]] + 1
            and _shapes(sample_kwargs[index]) == _shapes(sample_kwargs[index - 1])
        )
        if not follows:
            if index - start > 1:
                pieces.append(range(start, index))
            start = index
    return pieces


def _shapes(kwargs: dict[str, torch.Tensor]) -> dict[str, tuple]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in kwargs.items()}
