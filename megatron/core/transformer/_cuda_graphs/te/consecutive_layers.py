"""Which layers may be recorded in one graph."""

from collections.abc import Sequence

import torch

from ..hooks import has_other_hooks


def consecutive(
    decoder: Sequence[torch.nn.Module],
    layers: Sequence[torch.nn.Module],
    sample_kwargs: Sequence[dict[str, torch.Tensor]],
    most: int,
) -> list[range]:
    """Divide ``layers`` into pieces of up to ``most`` that follow each other; pieces of one are left out.

    Layers follow each other in ``decoder``, take keyword inputs that the first of them takes too, and have no hooks but
    Megatron-FSDP's, which are recorded with them.

    Args:
        decoder: All layers of the decoder, in order.
        layers: Those that are captured, in order.
        sample_kwargs: The static keyword inputs of each, for its first micro-batch.
        most: Layers in a piece.

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
            and all(layer in place and not has_other_hooks(layer) for layer in layers[index - 1 : index + 1])
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
