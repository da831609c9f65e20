"""The order of passes of a capture, and the static tensors that its graphs use in turn."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..snapshot import address_of


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


@dataclass(eq=False, slots=True)
class Lease[Buffers]:
    """Static tensors of a ``BufferPool``, with the number of those that use them.

    Attributes:
        key: Requests with an equal key may be served by these tensors.
        holders: How many hold them; 0 while they are free.
    """

    key: Hashable
    buffers: Buffers
    holders: int = 0


class BufferPool[Buffers]:
    """Lends static tensors by key, first freed first.

    Calls must come in the order in which the graphs will be replayed. Releasing tensors asserts that from then on only
    replays of their next holder read or write them.
    """

    def __init__(self) -> None:
        self._free: defaultdict[Hashable, deque[Lease[Buffers]]] = defaultdict(deque)

    def acquire(self, key: Hashable, make: Callable[[], Buffers]) -> Lease[Buffers]:
        """Return free tensors for ``key``, or new ones from ``make``, with one holder."""
        free = self._free[key]
        lease = free.popleft() if free else Lease(key, make())
        lease.holders = 1
        return lease

    def retain(self, lease: Lease[Buffers]) -> None:
        """Add a holder; a ``ValueError`` if the tensors are free."""
        if not lease.holders:
            raise ValueError("static memory is used after it was given back")
        lease.holders += 1

    def release(self, lease: Lease[Buffers]) -> None:
        """Remove a holder; after the last one the tensors are free for the next ``acquire`` with their key.

        Raises:
            ValueError: they are free already.
        """
        if not lease.holders:
            raise ValueError("static memory is given back twice")
        lease.holders -= 1
        if not lease.holders:
            self._free[lease.key].append(lease)

    def free(self) -> list[Buffers]:
        """Return the tensors that are free."""
        return [lease.buffers for leases in self._free.values() for lease in leases]


def share_inputs[Inputs](
    plan: Plan, signature_of: Callable[[int], Hashable], inputs_of: Callable[[int], Inputs]
) -> list[Inputs]:
    """Return the inputs of every slot of ``plan``.

    A slot's inputs are in use from its forward pass to its last pass. After that the next forward pass with the same
    signature uses them, first freed first.

    Args:
        plan: The passes in the order in which they run.
        signature_of: Returns a key for a slot: only slots with equal keys share inputs.
        inputs_of: Returns the inputs of a slot; called only for slots that need inputs of their own.
    """
    pool = BufferPool[Inputs]()
    leases: dict[int, Lease[Inputs]] = {}
    last_steps = plan.last_steps()
    for step in plan.steps:
        if step.kind is Pass.FORWARD:
            leases[step.slot] = pool.acquire(signature_of(step.slot), partial(inputs_of, step.slot))
        elif step in last_steps:
            pool.release(leases[step.slot])
    return [leases[slot].buffers for slot in range(len(plan.callable_of_slot))]


def distinct(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return inputs into which those of replays can be copied one by one.

    A tensor that shares memory with another (because it occurs twice, say) gets memory of its own: a replay may be
    given two different ones. An expanded tensor, whose elements share memory, becomes a dense one.
    """
    taken: list[_Span] = []

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if _is_expanded(leaf) or _overlaps(leaf, taken):
            return _dense_copy(leaf)
        taken.extend(_span_of(leaf))
        return leaf

    return tree_map(own, (args, kwargs))


def keep_apart(plan: Plan, inputs: Sequence[tuple[tuple, dict[str, Any]]]) -> list[tuple[tuple, dict[str, Any]]]:
    """Give slots whose lives overlap their own memory for inputs that require grad.

    Where capture was given one activation for several slots, the forward pass of a later slot would overwrite what the
    backward pass of an earlier one reads. Inputs that require no grad (masks, position embeddings) may be the same for
    all slots, and stay shared.

    Args:
        plan: The passes in the order in which they run; a slot lives from its forward pass to its last one.
    """
    last_steps = plan.last_steps()
    apart = list(inputs)
    taken: dict[int, list[_Span]] = {}
    for step in plan.steps:
        if step.kind is Pass.FORWARD:
            others = [span for spans in taken.values() for span in spans]

            def own(leaf: Any, others: list[_Span] = others) -> Any:
                shared = isinstance(leaf, torch.Tensor) and leaf.requires_grad and _overlaps(leaf, others)
                return _dense_copy(leaf) if shared else leaf

            apart[step.slot] = tree_map(own, inputs[step.slot])
            leaves = [leaf for leaf in tree_leaves(apart[step.slot]) if isinstance(leaf, torch.Tensor)]
            taken[step.slot] = [span for leaf in leaves if leaf.requires_grad for span in _span_of(leaf)]
        elif step in last_steps:
            del taken[step.slot]
    return apart


_Span = tuple[int, int]  # the first address of a tensor, and the one behind its last element


def _span_of(tensor: torch.Tensor) -> list[_Span]:
    """Where ``tensor`` lies; nothing for one without elements or of another layout."""
    start = address_of(tensor) if tensor.layout is torch.strided and tensor.numel() else 0
    if not start:
        return []
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return [(start, start + (last + 1) * tensor.element_size())]


def _overlaps(tensor: torch.Tensor, taken: Iterable[_Span]) -> bool:
    return any(
        start < other_end and other_start < end for start, end in _span_of(tensor) for other_start, other_end in taken
    )


def _dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)


def _is_expanded(tensor: torch.Tensor) -> bool:
    strided = tensor.layout is torch.strided
    return strided and any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def signature(args: tuple, kwargs: Mapping[str, Any]) -> Hashable:
    """Return the structure of inputs, with shape, dtype and layout in place of tensors; keyword order is ignored."""
    leaves, structure = tree_flatten((args, sorted(kwargs.items())))
    return repr(structure), tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.layout, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for leaf in leaves
    )
