"""Names of a model's parameters that do not depend on its division into pipeline stages.

Each chunk of the model counts its layers from 0. Checkpoints hold the parameters of all stages by name, so names in
checkpoints contain the layer's number in the whole model. An output layer that is tied to another stage's embedding
uses the embedding's name.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

# Prefixes of wrappers; the outermost list of layers with a layer's index.
_WRAPPERS = re.compile(r"(?:module\.)*")
_PARTS = re.compile(r"((?:module\.)*)((?:.*?\.)??layers)\.(\d+)(?=\.|$)")


def inner_name(name: str) -> str:
    """Return ``name`` without the prefixes of wrappers."""
    return _WRAPPERS.sub("", name, count=1).removeprefix(".")


def unused_output_weights(chunks: Iterable[torch.nn.Module]) -> set[str]:
    """Return the names, without wrappers, of output layers' weights in ``chunks`` that no pass reads.

    A stage with multi-token prediction has a copy of the embedding, and a tied output layer uses that copy.
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
        chunk: A chunk of the model, wrapped or not. Its layers' ``layer_number`` counts from 1 in the whole model.
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
    """Merge the values of a pipeline stage's chunks into one dictionary by global name.

    Args:
        named: For each chunk, its values by name.

    Raises:
        ValueError: Two chunks have a value of the same global name.
    """
    merged: dict[str, Any] = {}
    for chunk, values in zip(chunks, named, strict=True):
        rename = global_name(chunk)
        for name, value in values.items():
            if merged.setdefault(rename(name), value) is not value:
                raise ValueError(
                    f"{rename(name)} is in two chunks of this pipeline stage, but a checkpoint can hold only one of "
                    "them: remove --num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank"
                )
    return merged
