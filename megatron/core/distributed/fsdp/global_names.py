"""Names of a model's parameters that do not depend on how pipeline stages share its layers.

A chunk of the model counts its layers from 0. Checkpoints hold the parameters of all stages by name, so each layer has
to have the number there that it has in the whole model. An output layer that has the weights of another stage's
embedding has their name, too.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

# What wrappers put in front, the outermost list of layers with a layer's place in it, and the rest.
_WRAPPERS = re.compile(r"(?:module\.)*")
_PARTS = re.compile(r"((?:module\.)*)((?:.*?\.)??layers)\.(\d+)(?=\.|$)")


def inner_name(name: str) -> str:
    """Return ``name`` without what wrappers put in front."""
    return _WRAPPERS.sub("", name, count=1).removeprefix(".")


def unused_output_weights(chunks: Iterable[torch.nn.Module]) -> set[str]:
    """Return the names without wrappers of output layers' weights in ``chunks`` that no pass reads.

    A stage that predicts further tokens has a copy of the embedding, and where that is tied the output layer uses it.
    """
    return {
        inner_name(f"{name}.output_layer.weight")
        for chunk in chunks
        for name, module in chunk.named_modules()
        if getattr(module, "share_embeddings_and_output_weights", False) and hasattr(module, "embedding")
        if not module.pre_process
    }


def global_name(chunk: torch.nn.Module) -> Callable[[str], str]:
    """Return a function from a name of a module, parameter or state in ``chunk`` to the global name.

    Args:
        chunk: A chunk of the model, wrapped or not; its layers have ``layer_number``, in the whole model and from 1.
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
    """Return what the chunks of a pipeline stage have by name, in one dictionary by global name.

    Args:
        named: Of each chunk, values by name.

    Raises:
        ValueError: two chunks have a value of the same global name.
    """
    merged: dict[str, Any] = {}
    for chunk, values in zip(chunks, named, strict=True):
        rename = global_name(chunk)
        for name, value in values.items():
            if merged.setdefault(rename(name), value) is not value:
                raise ValueError(
                    f"{rename(name)} is in two chunks of this pipeline stage, and a checkpoint could hold one of them "
                    "only: leave out --num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank"
                )
    return merged
