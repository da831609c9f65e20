"""Plan the order of passes in a capture, and the reuse of static tensors between its graphs."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from .memory import storage_address


class Pass(Enum):
    """Kind of a pass. Delayed weight gradients are computed in a separate pass."""

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
    """Steps of warm-up and capture, in training order.

    Attributes:
        callable_of_slot: For each slot, the index of its callable. Slots are numbered by model chunk, then
            micro-batch, then layer within the chunk; without an order there is one slot per callable.
        runs: For each entry of the pipeline order, the steps of all layers of one chunk for one micro-batch.
    """

    callable_of_slot: tuple[int, ...]
    runs: tuple[tuple[Step, ...], ...]

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All steps, in training order."""
        return tuple(step for run in self.runs for step in run)

    @cached_property
    def slots_of_callables(self) -> list[list[int]]:
        """The slots of each callable, in the order of micro-batches."""
        slots: list[list[int]] = [[] for _ in {*self.callable_of_slot}]
        for slot, index in enumerate(self.callable_of_slot):
            slots[index].append(slot)
        return slots

    def forward_only(self) -> "Plan":
        """Return the plan without backward passes and weight gradients."""
        runs = (tuple(step for step in run if step.kind is Pass.FORWARD) for run in self.runs)
        return Plan(self.callable_of_slot, tuple(runs))

    def last_steps(self) -> frozenset[Step]:
        """Return the last step of every slot, after which other slots may reuse its static tensors."""
        return frozenset({step.slot: step for step in self.steps}.values())

    def gradients_read(self) -> dict[Step, list[int]]:
        """Return, for each backward step, the slots whose input gradients are no longer needed after it.

        Within a chunk, the next backward step reads them. The input gradients of a chunk's first layer leave the chunk,
        possibly for another pipeline stage, and have been read by the end of the next backward pass of any chunk.
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
    """Plan all forward passes, then all backward passes in reverse, each followed by its delayed weight gradients."""
    slots = range(num_callables)
    forward = tuple(Step(slot, Pass.FORWARD) for slot in slots)
    backward = tuple(Step(slot, kind) for slot in reversed(slots) for kind in (Pass.BACKWARD, Pass.WEIGHT_GRADIENTS))
    return Plan(callable_of_slot=tuple(slots), runs=(forward, backward))


def ordered_plan(order: Sequence[float], num_layers_per_chunk: Sequence[int] | None, num_callables: int) -> Plan:
    """Plan the passes of a pipeline order.

    Args:
        order: ``c`` for the forward pass of model chunk ``c``, counted from 1; ``-c`` for its backward pass;
            ``-c - 0.5`` for the weight gradients delayed by its backward pass. Include it for all micro-batches of a
            chunk or for none.
        num_layers_per_chunk: Number of callables of each chunk; None to divide the callables evenly.

    Raises:
        ValueError: The order is invalid, or does not match the number of callables.
    """
    passes = [_pass_of(entry) for entry in order]
    num_chunks = max((chunk for _, chunk in passes), default=1)
    counts = Counter(passes)
    num_microbatches = counts[Pass.FORWARD, 1]
    for chunk in range(1, num_chunks + 1):
        forward, backward, weights = (counts[kind, chunk] for kind in Pass)
        if not forward == backward == num_microbatches > 0 or weights not in (0, num_microbatches):
            expected = num_microbatches or 1
            raise ValueError(
                f"_order {[*order]} has {forward} forward, {backward} backward and {weights} weight-gradient passes of "
                f"chunk {chunk}: expected {expected} forward passes (the same for all chunks), {expected} backward "
                f"passes, and {expected} or 0 weight-gradient passes"
            )
    if num_layers_per_chunk is None:
        num_layers_per_chunk = [num_callables // num_chunks] * num_chunks
    if len(num_layers_per_chunk) != num_chunks or sum(num_layers_per_chunk) != num_callables:
        raise ValueError(
            f"_num_layers_per_chunk is {list(num_layers_per_chunk)}, but there are {num_chunks} chunks and "
            f"{num_callables} callables: list the number of callables of each chunk"
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
    for kind, chunk in passes:
        if kind in _AFTER and done[kind, chunk] == done[_AFTER[kind], chunk]:
            raise ValueError(
                f"_order runs the {kind.value} of chunk {chunk} before its {_AFTER[kind].value}: reorder it"
            )
        layers = num_layers_per_chunk[chunk - 1]
        first = first_layer[chunk - 1] * num_microbatches + done[kind, chunk] * layers
        slots = range(first, first + layers)
        runs.append(tuple(Step(slot, kind) for slot in (slots if kind is Pass.FORWARD else reversed(slots))))
        done[kind, chunk] += 1
    return Plan(tuple(callable_of_slot), tuple(runs))


_AFTER = {Pass.BACKWARD: Pass.FORWARD, Pass.WEIGHT_GRADIENTS: Pass.BACKWARD}


def _pass_of(entry: float) -> tuple[Pass, int]:
    """Return the pass and the chunk, counted from 1, of an entry in an order."""
    kind = Pass.FORWARD if entry > 0 else Pass.BACKWARD if entry == int(entry) else Pass.WEIGHT_GRADIENTS
    chunk = int(abs(entry))
    if chunk < 1 or entry not in (chunk, -chunk, -chunk - 0.5):
        raise ValueError(
            f"_order contains {entry}: for chunk c, counted from 1, use c (forward), -c (backward) "
            "and -c - 0.5 (weight gradients)"
        )
    return kind, chunk


def share_inputs[Inputs](
    plan: Plan, signature_of: Callable[[int], Hashable], inputs_of: Callable[[int], Inputs]
) -> list[Inputs]:
    """Return the inputs of every slot of ``plan``, shared between slots that are not in use at the same time.

    A slot is in use from its forward pass to its last pass. Afterwards, the next forward pass of a slot with the same
    ``signature_of`` reuses its inputs, first in, first out. ``inputs_of`` makes new inputs if there are none to reuse.
    """
    free: defaultdict[Hashable, deque[Inputs]] = defaultdict(deque)
    inputs: dict[int, Inputs] = {}
    last_steps = plan.last_steps()
    for step in plan.steps:
        alike = free[signature_of(step.slot)]
        if step.kind is Pass.FORWARD:
            inputs[step.slot] = alike.popleft() if alike else inputs_of(step.slot)
        elif step in last_steps:
            alike.append(inputs[step.slot])
    return [inputs[slot] for slot in range(len(plan.callable_of_slot))]


def separate(plan: Plan, inputs: Sequence[tuple[tuple, dict[str, Any]]]) -> list[tuple[tuple, dict[str, Any]]]:
    """Return the ``inputs`` of each slot, with copies of aliased tensors that must not share memory in replays.

    A tensor that aliases another input of its slot is copied, because a replay may receive two different tensors. A
    tensor that aliases an input of another slot in use is also copied, because the forward pass of one slot would
    overwrite what the backward pass of the other reads. Tensors marked ``constant`` have the same values in every call
    and are not copied. Expanded tensors become dense.
    """
    last_steps = plan.last_steps()
    apart = list(inputs)
    in_use: dict[int, set[int]] = {}
    for step in plan.steps:
        if step.kind is Pass.FORWARD:
            others = set().union(*in_use.values())
            own: set[int] = set()

            def separated(tensor: torch.Tensor, own: set[int] = own, others: set[int] = others) -> torch.Tensor:
                address = storage_address(tensor)
                shared = address in others and not getattr(tensor, "constant", False)
                if address in own or shared or _is_expanded(tensor):
                    dense = tensor.detach().clone(memory_format=torch.contiguous_format)
                    return dense.requires_grad_(tensor.requires_grad)
                own.add(address)
                return tensor

            apart[step.slot] = tree_map(separated, inputs[step.slot])
            in_use[step.slot] = {*map(storage_address, tree_leaves(apart[step.slot]))}
        elif step in last_steps:
            del in_use[step.slot]
    return apart


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def signature(args: tuple, kwargs: Mapping[str, Any]) -> Hashable:
    """Return a key of the structure, shapes, dtypes and layouts of inputs, independent of keyword order."""
    leaves, structure = tree_flatten((args, sorted(kwargs.items())))
    return repr(structure), tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.layout, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    )
