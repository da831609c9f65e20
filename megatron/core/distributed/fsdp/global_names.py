"""Map parameter names to global names, which do not depend on the split into pipeline stages.

Each model chunk numbers its layers from 0. A checkpoint stores the parameters of all stages by name, so its names
contain global layer numbers. An output layer tied to the embedding of a different stage uses the embedding's name.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

# Patterns of wrapper prefixes, and of a name up to its outermost layer index.
_WRAPPERS = re.compile(r"(?:module\.)*")
_PARTS = re.compile(r"((?:module\.)*)((?:.*?\.)??layers)\.(\d+)(?=\.|$)")


def inner_name(name: str) -> str:
    """Return ``name`` without wrapper prefixes."""
    return _WRAPPERS.sub("", name, count=1).removeprefix(".")


def unused_output_weights(chunks: Iterable[torch.nn.Module]) -> set[str]:
    """Return the names of unused output layer weights in ``chunks``, without wrapper prefixes.

    With multi-token prediction, a tied output layer uses the stage's copy of the embedding instead.
    """
    return {
        inner_name(f"{name}.output_layer.weight")
        for chunk in chunks
        for name, module in chunk.named_modules()
        if getattr(module, "share_embeddings_and_output_weights", False) and hasattr(module, "embedding")
        if not module.pre_process
    }


def global_name(chunk: torch.nn.Module) -> Callable[[str], str]:
    """Return a function that maps names of modules, parameters or states in ``chunk`` to global names.

    Args:
        chunk: A model chunk, wrapped or not. The ``layer_number`` of its layers is global and starts at 1.
    """
    numbers = {}
    tied = {}
    for name, module in chunk.named_modules():
        if getattr(module, "share_embeddings_and_output_weights", False) and not hasattr(module, "embedding"):
            tied[inner_name(f"{name}.output_layer.weight")] = inner_name(f"{name}.embedding.word_embeddings.weight")
        parts = _PARTS.fullmatch(name)
        if parts is not None and hasattr(module, "layer_number"):
            numbers[parts[2], parts[3]] = module.layer_number - 1

    def replaced(parts: re.Match[str]) -> str:
        return f"{parts[1]}{parts[2]}.{numbers.get((parts[2], parts[3]), parts[3])}"

    def renamed(name: str) -> str:
        inner = inner_name(name)
        if inner in tied:
            return name.removesuffix(inner) + tied[inner]
        return _PARTS.sub(replaced, name, count=1) if _PARTS.match(name) else name

    return renamed


def by_global_name(chunks: Sequence[torch.nn.Module], named: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge the dictionaries in ``named``, one per chunk of a pipeline stage, into one keyed by global name.

    Raises:
        ValueError: Two chunks have different values with the same global name.
    """
    merged: dict[str, Any] = {}
    for chunk, values in zip(chunks, named, strict=True):
        rename = global_name(chunk)
        for name, value in values.items():
            if merged.setdefault(rename(name), value) is not value:
                raise ValueError(
                    f"{rename(name)} is in two chunks of this pipeline stage, but a checkpoint can hold only one of "
                    "them: remove --num-layers-per-virtual-pipeline-stage or --num-virtual-stages-per-pipeline-rank"
                )
    return merged
