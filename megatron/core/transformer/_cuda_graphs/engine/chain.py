"""Chains: consecutive callables whose passes are recorded in one graph.

The first output of each callable is the first input of the next. What their hooks enqueue, collectives for example, is
recorded with them. A replay runs the whole chain: the first callable starts it and returns the last one's output, and
the others hand on what they are given, each in the structure of its own output.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch.utils._pytree import tree_unflatten

from .gradient_sink import AroundBackward
from .slot import GraphedSlot

APART = "Set --cuda-graph-layers-per-graph 1, a graph for each layer,"
Phase = Literal["forward", "backward"]


class ChainOwner(AroundBackward, Protocol):
    """Who sees to what the graphs of a chain use but do not hold."""

    def recording(self, phase: Phase) -> AbstractContextManager[None]:
        """Return the context in which this phase is recorded. At its end all work has joined the current stream."""

    def before_forward(self) -> None:
        """Called right before each replay of the forward graph, on the stream of the forward pass."""


@dataclass(frozen=True)
class Chain:
    """Callables that are recorded together.

    Attributes:
        members: The indices of the callables, which are consecutive in a model chunk.
        owner: Who sees to the rest.
    """

    members: Sequence[int]
    owner: ChainOwner


class ChainFollower:
    """A callable of a chain other than the first: returns its first input, which the chain has computed already.

    Args:
        slot: The callable for one micro-batch.
        leader: The first of the chain.

    Attributes:
        replays: 0: the first one replays.
    """

    replays = 0

    def __init__(self, slot: GraphedSlot, leader: GraphedSlot):
        self.name = slot.name
        self._leader: GraphedSlot | None = leader
        self._returns_one_tensor, self._spec = slot.returns_one_tensor, slot.output_spec

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument, as the callable would return its output.

        Raises:
            RuntimeError: after ``reset``; or it is not what the first callable of the chain returned, or a keyword
                input is not the one that callable was given.
        """
        if self._leader is None or self._leader.forward_graph is None:
            raise RuntimeError(f"the graphs of {self.name} were reset; capture them again to replay them")
        given = args[0]
        if not isinstance(given, torch.Tensor) or (given.data_ptr(), given._version) != self._leader.returned:
            raise RuntimeError(
                f"{self.name} runs in one graph with the layers before it, and is not given what they returned. "
                f"{APART} for a model that changes hidden states between layers"
            )
        for name, address in self._leader.given.items():
            if name in kwargs and kwargs[name].data_ptr() != address:
                raise RuntimeError(
                    f"{self.name} runs in one graph with the layers before it, which got another {name}. {APART} for a "
                    f"model whose layers differ in {name}"
                )
        return given if self._returns_one_tensor else tree_unflatten((given,), self._spec)

    def reset(self) -> None:
        """Let go of the chain."""
        self._leader = None
