"""Turns a pipeline order into steps over (layer, micro-batch) slots: which graph is captured when."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate, pairwise


class Pass(Enum):
    """The kind of a step. Weight gradients are a pass of their own if modules delay them."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT_GRADIENTS = "weight gradients"


@dataclass(frozen=True)
class Step:
    """One pass of one slot."""

    slot: int
    kind: Pass


@dataclass(frozen=True)
class Plan:
    """The steps of warm-up and of capture.

    Attributes:
        callable_of_slot: For each slot the index of its callable. Slots are numbered by model chunk, then
            micro-batch, then layer of the chunk; without an order there is one slot per callable.
        runs: The steps of each entry of the order (the layers of one chunk for one micro-batch), as in training.
    """

    callable_of_slot: tuple[int, ...]
    runs: tuple[tuple[Step, ...], ...]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All steps, in the order in which they run in training."""
        return tuple(step for run in self.runs for step in run)

    @cached_property
    def slots_of_callables(self) -> list[list[int]]:
        """For each callable its slots, by micro-batch."""
        slots: list[list[int]] = [[] for _ in {*self.callable_of_slot}]
        for slot, index in enumerate(self.callable_of_slot):
            slots[index].append(slot)
        return slots

    def last_steps(self) -> frozenset[Step]:
        """The last step of every slot, after which another slot may use its static tensors."""
        return frozenset({step.slot: step for step in self.steps}.values())

    def gradients_read(self) -> dict[Step, list[int]]:
        """For each backward step the slots whose input gradients have been read once the step has run.

        Within a chunk the next backward step reads them. Those of a chunk's first layer leave the chunk, perhaps to
        another pipeline stage, and are known to have been read at the end of the next backward pass of a chunk.
        """
        read: dict[Step, list[int]] = {}
        leaving: int | None = None
        for run in self.runs:
            backward = [step for step in run if step.kind is Pass.BACKWARD]
            for step, following in pairwise(backward):
                read.setdefault(following, []).append(step.slot)
            if backward:
                if leaving is not None:
                    read.setdefault(backward[-1], []).append(leaving)
                leaving = backward[-1].slot
        return read


def unordered_plan(num_callables: int) -> Plan:
    """All forward passes, then all backward passes in reverse, each followed by delayed weight gradients."""
    slots = range(num_callables)
    forward = tuple(Step(slot, Pass.FORWARD) for slot in slots)
    backward = tuple(Step(slot, kind) for slot in reversed(slots) for kind in (Pass.BACKWARD, Pass.WEIGHT_GRADIENTS))
    return Plan(callable_of_slot=tuple(slots), runs=(forward, backward))


def ordered_plan(order: Sequence[float], num_layers_per_chunk: Sequence[int] | int | None, num_callables: int) -> Plan:
    """Follow a pipeline order.

    Args:
        order: For each step ``c`` (forward of model chunk ``c``, counted from 1), ``-c`` (its backward) or ``-c - 0.5``
            (the weight gradients that its backward delayed, for every micro-batch of the chunk or for none).
        num_layers_per_chunk: The number of callables of each chunk; one number for all chunks, or None to divide the
            callables evenly.

    Raises:
        ValueError: the order and the counts contradict each other.
    """
    num_chunks = max(map(int, order), default=0)
    if num_chunks < 1:
        raise ValueError(f"_order must name chunks counted from 1, got {list(order)}")
    steps_of_order = [_step_of_order(step) for step in order]
    unknown = [step for step, (_, chunk) in zip(order, steps_of_order, strict=True) if not 1 <= chunk <= num_chunks]
    if unknown:
        raise ValueError(f"_order names chunks {unknown}, but runs the forward of chunks 1 to {num_chunks} only")
    counts = Counter(steps_of_order)
    num_microbatches = counts[Pass.FORWARD, 1]
    for chunk in range(1, num_chunks + 1):
        forward, backward, weights = (counts[kind, chunk] for kind in Pass)
        if forward != num_microbatches or backward != num_microbatches:
            raise ValueError(
                f"_order must run every chunk's forward and backward {num_microbatches} times (as often as chunk 1's "
                f"forward), but runs chunk {chunk} {forward} and {backward} times"
            )
        if weights not in (0, num_microbatches):
            raise ValueError(
                f"_order must run the weight gradients of chunk {chunk} (-{chunk}.5) after each of its "
                f"{num_microbatches} backwards or never, but runs them {weights} times"
            )
    if num_layers_per_chunk is None:
        num_layers_per_chunk, rest = divmod(num_callables, num_chunks)
        if rest:
            raise ValueError(
                f"{num_callables} callables do not divide into {num_chunks} chunks: give _num_layers_per_chunk"
            )
    if isinstance(num_layers_per_chunk, int):
        num_layers_per_chunk = [num_layers_per_chunk] * num_chunks
    if len(num_layers_per_chunk) != num_chunks or sum(num_layers_per_chunk) != num_callables:
        raise ValueError(
            f"_num_layers_per_chunk is {list(num_layers_per_chunk)}, but there are {num_chunks} chunks and "
            f"{num_callables} callables"
        )

    first_layer = [0, *accumulate(num_layers_per_chunk)]
    callable_of_slot = [
        first_layer[chunk] + layer
        for chunk, layers in enumerate(num_layers_per_chunk)
        for _ in range(num_microbatches)
        for layer in range(layers)
    ]
    runs: list[tuple[Step, ...]] = []
    done: Counter = Counter()
    for kind, chunk in steps_of_order:
        if kind in _AFTER and done[kind, chunk] == done[_AFTER[kind], chunk]:
            raise ValueError(f"_order runs the {kind.value} of chunk {chunk} before its {_AFTER[kind].value}")
        layers = num_layers_per_chunk[chunk - 1]
        first = first_layer[chunk - 1] * num_microbatches + done[kind, chunk] * layers
        slots = range(first, first + layers)
        runs.append(tuple(Step(slot, kind) for slot in (slots if kind is Pass.FORWARD else reversed(slots))))
        done[kind, chunk] += 1
    return Plan(tuple(callable_of_slot), tuple(runs))


_AFTER = {Pass.BACKWARD: Pass.FORWARD, Pass.WEIGHT_GRADIENTS: Pass.BACKWARD}


def _step_of_order(step: float) -> tuple[Pass, int]:
    """Return the pass and the chunk, counted from 1, of an entry of an order."""
    if step == int(step):
        return (Pass.FORWARD, int(step)) if step > 0 else (Pass.BACKWARD, int(-step))
    if step > 0 or step != int(step) - 0.5:
        raise ValueError(f"_order holds {step}: it may hold c, -c and -c - 0.5 for chunks c counted from 1")
    return Pass.WEIGHT_GRADIENTS, int(-step)
