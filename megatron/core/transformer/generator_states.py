"""States of random number generators that CUDA graphs can use."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _clone_nested_tensors(value: Any) -> Any:
    """Return ``value`` with every tensor in it cloned; tuples, lists and dicts are rebuilt, anything else is shared.

    Raises:
        TypeError: a set, whose members a graph could not tell apart.
    """
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (set, frozenset)):
        raise TypeError("tensors in a set have no order that CUDA graphs could keep: use a tuple or a list")
    if isinstance(value, dict):
        return {key: _clone_nested_tensors(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_clone_nested_tensors, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(_clone_nested_tensors, value))
    return value


def _ensure_generator_state_is_cudagraph_safe(gen: torch.Generator) -> torch.Generator:
    """Let graphs use ``gen`` whose state was made or set under ``torch.inference_mode``, and return it.

    Tensors that are made in that mode are inference tensors, which may not be written outside it. The state gets the
    same value anew, from a clone that is none. It stays the same object: graphs that know it go on drawing from it.
    """
    with torch.inference_mode(False):
        gen.set_state(_clone_nested_tensors(gen.get_state()))
    return gen


def state_in_use() -> torch.Generator:
    """Return a generator that shares the state from which the device's default generator draws at this moment.

    Megatron's and TransformerEngine's RNG trackers put others there: the decoder runs its layers so under sequence
    parallelism.
    """
    return torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_get_state()


@contextmanager
def drawing_from(state: torch.Generator) -> Iterator[None]:
    """Let the device's default generator draw from ``state``, of ``state_in_use``."""
    default, before = torch.cuda.default_generators[torch.cuda.current_device()], state_in_use()
    default.graphsafe_set_state(state)
    try:
        yield
    finally:
        default.graphsafe_set_state(before)
