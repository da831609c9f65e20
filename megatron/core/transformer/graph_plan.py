"""Which graph is captured when: a pipeline order turned into steps over (layer, micro-batch) slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Step:
    """One forward or backward pass of one slot."""

    slot: int
    backward: bool


@dataclass(frozen=True)
class Plan:
    """What to run, for warm-up and for capture alike.

    Attributes:
        callable_of_slot: For each slot the index of its callable. Slots are numbered by model chunk, then
            micro-batch, then layer of the chunk; without an order there is one slot per callable.
        steps: The passes in the order in which they run in training.
    """

    callable_of_slot: tuple[int, ...]
    steps: tuple[Step, ...]


def unordered_plan(num_callables: int) -> Plan:
    """All forward passes, then all backward passes in reverse."""
    slots = range(num_callables)
    return Plan(
        callable_of_slot=tuple(slots),
        steps=(*(Step(slot, False) for slot in slots), *(Step(slot, True) for slot in reversed(slots))),
    )


def ordered_plan(order: Sequence[int], num_layers_per_chunk: Sequence[int] | int | None, num_callables: int) -> Plan:
    """Follow a pipeline order.

    Args:
        order: For each step ``c`` (forward of model chunk ``c``, counted from 1) or ``-c`` (its backward).
        num_layers_per_chunk: How many callables each chunk holds; one number for all chunks, or None where the
            callables divide evenly.
        num_callables: How many callables there are.

    Raises:
        ValueError: the order and the counts contradict each other.
        NotImplementedError: the order holds half steps (delayed weight gradients).
    """
    if any(int(step) != step for step in order):
        raise NotImplementedError(
            "_order holds half steps (delayed weight gradients), which only TransformerEngine's engine captures"
        )
    num_chunks = max(order, default=0)
    if num_chunks < 1:
        raise ValueError(f"_order must name chunks counted from 1, got {list(order)}")
    unknown = [step for step in order if not 1 <= abs(step) <= num_chunks]
    if unknown:
        raise ValueError(f"_order names chunks {unknown}, but runs the forward of chunks 1 to {num_chunks} only")
    num_microbatches = len(order) // num_chunks // 2
    for chunk in range(1, num_chunks + 1):
        forward, backward = order.count(chunk), order.count(-chunk)
        if forward != num_microbatches or backward != num_microbatches:
            raise ValueError(
                f"_order must run every chunk's forward and backward {num_microbatches} times (its length, "
                f"{len(order)}, over {num_chunks} chunks), but runs chunk {chunk} {forward} and {backward} times"
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
    steps = []
    forwards, backwards = [0] * num_chunks, [0] * num_chunks
    for step in order:
        chunk, backward = abs(step) - 1, step < 0
        done = backwards if backward else forwards
        if backward and backwards[chunk] == forwards[chunk]:
            raise ValueError(f"_order runs a backward of chunk {chunk + 1} before its forward")
        layers = num_layers_per_chunk[chunk]
        first = first_layer[chunk] * num_microbatches + done[chunk] * layers
        slots = range(first, first + layers)
        steps += [Step(slot, backward) for slot in (reversed(slots) if backward else slots)]
        done[chunk] += 1
    return Plan(tuple(callable_of_slot), tuple(steps))
