"""Which layers may be recorded in one graph."""

from collections.abc import Collection, Sequence

import torch

from ..hooks import has_other_hooks


def with_hooks_of_others(layers: Sequence[torch.nn.Module]) -> set[int]:
    """Return the indices of the layers that have hooks beside Megatron-FSDP's, which are recorded with them."""
    return {index for index, layer in enumerate(layers) if has_other_hooks(layer)}


def consecutive(
    decoder: Sequence[torch.nn.Module],
    layers: Sequence[torch.nn.Module],
    sample_kwargs: Sequence[dict[str, torch.Tensor]],
    most: int,
    alone: Collection[int] = (),
) -> list[range]:
    """Divide ``layers`` into pieces of up to ``most`` that follow each other; pieces of one are left out.

    Layers follow each other in ``decoder``, and take keyword inputs that the first of them takes too.

    Args:
        decoder: All layers of the decoder, in order.
        layers: Those that are captured, in order.
        sample_kwargs: The static keyword inputs of each, for its first micro-batch.
        most: Layers in a piece.
        alone: The indices of layers that are in no piece.

    Returns:
        The indices in ``layers`` of each piece.
    """
    place = {layer: index for index, layer in enumerate(decoder)}
    pieces: list[range] = []
    start = 0
    for index in range(1, len(layers) + 1):
        follows = (
            index < len(layers)
            and index - start < most
            and all(layers[i] in place and i not in alone for i in (index - 1, index))
            and place[layers[index]] == place[layers[index - 1]] + 1
            and _shapes(sample_kwargs[index]).items() <= _shapes(sample_kwargs[start]).items()
        )
        if not follows:
            if index - start > 1:
                pieces.append(range(start, index))
            start = index
    return pieces


def _shapes(kwargs: dict[str, torch.Tensor]) -> dict[str, tuple]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in kwargs.items()}
