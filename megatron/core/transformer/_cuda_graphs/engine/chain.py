"""Chains: consecutive callables whose passes are recorded in one graph.

The first output of each callable is the first input of the next. What their hooks enqueue, collectives for example, is
recorded with them. A replay runs the whole chain: the first callable starts it, and the last one returns its output.
What passes between them are placeholders, see ``handover``.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch.utils._pytree import tree_unflatten

from .gradient_sink import AroundBackward
from .slot import GraphedSlot

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
    """A callable of a chain other than the first: its call takes and returns what stands for the chain's tensors.

    Args:
        slot: The callable for one micro-batch.
        leader: The first of the chain.
        place: The callable's place in the chain, from 1 on.

    Attributes:
        replays: 0: the first one replays.
    """

    replays = 0

    def __init__(self, slot: GraphedSlot, leader: GraphedSlot, place: int):
        self.name = slot.name
        self._leader: GraphedSlot | None = leader
        self._place = place
        handover = leader.handover
        assert handover is not None
        self._handover = handover
        self._taken: Any = handover.between[place - 1]
        self._returned: Any = handover.between[place] if place < len(handover.between) else None
        self._returns_one_tensor, self._returns_tuple = slot.returns_one_tensor, slot.returns_tuple
        self._spec = slot.output_spec

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a placeholder, or after the last callable the chain's output, as the callable would its own.

        Raises:
            RuntimeError: after ``reset``; the callable before was not the last one called, or the first argument is not
                what that returned; or a keyword input is not the one that the first callable was given, or has changed.
        """
        if self._leader is None or self._leader.forward_graph is None:
            raise RuntimeError(f"the graphs of {self.name} were reset; capture them again to replay them")
        handover = self._handover
        if args[0] is not self._taken or handover.called != self._place:
            handover.refuse(self._place, args[0])
        for name, (tensor, version) in handover.given.items():
            if name in kwargs:
                given = kwargs[name]
                if given._version != version or (given is not tensor and given.data_ptr() != tensor.data_ptr()):
                    handover.refuse_keyword(self._place, name)
        handover.called += 1
        returned = self._returned
        if returned is None:
            returned = handover.end()
        if self._returns_one_tensor:
            return returned
        return (returned,) if self._returns_tuple else tree_unflatten((returned,), self._spec)

    def name_inputs(self, owner: str, names: Sequence[str], advice: str) -> None:
        """Let errors call the callable ``owner``; its inputs are checked at the first one of the chain."""
        self.name = owner
        self._handover.rename(self._place, owner)

    def reset(self) -> None:
        """Let go of the chain."""
        self._leader = None
        self._handover.forget()
