"""Runs the passes of a plan over its slots: to warm up, then to capture."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from .buffers import BufferPool, Lease
from .capture import Capture, not_recording
from .chain import Chain
from .plan import Pass, Plan, Step
from .replay_order import ReplayOrder
from .slot import GraphedSlot


class CapturePasses:
    """The passes of one capture.

    Args:
        plan: The passes, in order.
        slots: The slots of the plan.
        training: Whether backward passes run.
        shares_memory: Whether graphs that are captured later may use memory that no later replay reads.
        chains: The chain that a callable is in, by the callable's index.
    """

    def __init__(
        self,
        plan: Plan,
        slots: Sequence[GraphedSlot],
        training: bool,
        shares_memory: bool,
        chains: Mapping[int, Chain] | None = None,
    ):
        self._chains = chains or {}
        self._plan, self._slots = plan, slots
        self._training = training
        self._shares_memory = shares_memory
        self._last_steps = plan.last_steps()
        self._gradients_read = plan.gradients_read() if shares_memory else {}
        self._with_weight_gradients = {step.slot for step in plan.steps if step.kind is Pass.WEIGHT_GRADIENTS}

    def warm_up(self) -> None:
        """Run all passes once and drop their results."""
        self._run(None)

    def capture(self, capture: Capture) -> None:
        """Record all passes."""
        self._run(capture)

    def _run(self, capture: Capture | None) -> None:
        grads, order = _StaticGradients(), ReplayOrder()
        for steps in recorded_together(self._plan, {} if capture is None else self._chains):
            if capture is not None and len(steps) > 1:
                self._capture_chain(steps, grads, capture)
            elif self._runs(steps[0]):
                slot = self._slots[steps[0].slot]
                phase = "warm-up" if capture is None else "capture"
                with torch.profiler.record_function(f"{slot.name} {steps[0].kind.value} {phase}"):
                    self._run_step(steps[0], slot, grads, capture)
            elif capture is not None and self._shares_memory and steps[0].kind is Pass.BACKWARD:
                self._slots[steps[0].slot].release_outputs()  # in evaluation, where no backward pass runs
            if capture is not None and steps[0].kind is not Pass.WEIGHT_GRADIENTS:
                first = steps[0 if steps[0].kind is Pass.FORWARD else -1]  # of a chain
                self._slots[first.slot].take_turn(order, first.kind)
            for step in steps:
                # Gradients that backward returns unchanged would be overwritten before they are read.
                static = self._slots[step.slot].returns_static_gradients
                if self._shares_memory and step in self._last_steps and not static:
                    grads.take_back(step.slot)

    def _capture_chain(self, steps: Sequence[Step], grads: "_StaticGradients", capture: Capture) -> None:
        """Record one phase of all callables of a chain in one graph, with what their hooks enqueue."""
        chain = self._chains[self._plan.callable_of_slot[steps[0].slot]]
        slots = [self._slots[step.slot] for step in steps]
        graph = capture.new_graph()
        if steps[0].kind is Pass.FORWARD:
            with capture.recording(graph), chain.owner.recording("forward"):
                for previous, slot in zip([None, *slots], slots):  # noqa: B905
                    if previous is not None:
                        slot.follow(previous, slots[0])
                    slot.forward(not_recording, graph)
            return
        lent = grads.lend(steps[0].slot, slots[0].differentiable_outputs)
        with capture.recording(graph), chain.owner.recording("backward"):
            for following, slot in zip([None, *slots], slots):  # noqa: B905
                if following is None:
                    slot.backward(not_recording, _given(lent), graph)
                else:
                    slot.backward(not_recording, _given(following.grad_inputs[:1]), graph)
                    following.forget_inputs()
                    slot.forget_outputs()
        first = slots[-1]
        first.lead(slots[::-1], chain.owner)
        if self._shares_memory:
            first.release_outputs()
            for step in steps:
                for read in self._gradients_read.get(step, ()):
                    if self._slots[read].grad_inputs:
                        self._slots[read].release_gradients()

    def _runs(self, step: Step) -> bool:
        if step.kind is Pass.FORWARD:
            return True
        return self._training and (step.kind is Pass.BACKWARD or self._slots[step.slot].delays_weight_gradients)

    def _run_step(self, step: Step, slot: GraphedSlot, grads: "_StaticGradients", capture: Capture | None) -> None:
        recording = not_recording if capture is None else capture.recording
        graph = None if capture is None else capture.new_graph()
        if step.kind is Pass.FORWARD:
            slot.forward(recording, graph)
        elif step.kind is Pass.WEIGHT_GRADIENTS:
            slot.weight_gradients(recording, graph)
        elif slot.delays_weight_gradients and step.slot not in self._with_weight_gradients:
            raise ValueError(
                f"{slot.name} delays its weight gradients, so _order must run them (-c - 0.5 for chunk c) after its "
                "backward"
            )
        else:
            slot.backward(recording, functools.partial(grads.lend, step.slot), graph)
        if not self._training:
            slot.detach_outputs()
        if capture is None:
            if step.kind is Pass.BACKWARD or not self._training:
                slot.drop_results()
        elif step.kind is Pass.BACKWARD and self._shares_memory:
            slot.release_outputs()
            for read in self._gradients_read.get(step, ()):
                self._slots[read].release_gradients()


def recorded_together(plan: Plan, chains: Mapping[int, Chain]) -> Iterator[tuple[Step, ...]]:
    """Yield the steps of ``plan`` in order, those that are recorded in one graph together.

    Args:
        plan: The passes.
        chains: The chain that a callable is in, by the callable's index.
    """
    for run in plan.runs:
        rest = run
        while rest:
            chain = chains.get(plan.callable_of_slot[rest[0].slot])
            count = 1 if chain is None or rest[0].kind is Pass.WEIGHT_GRADIENTS else len(chain.members)
            yield rest[:count]
            rest = rest[count:]


def _given(grads: Sequence[torch.Tensor | None]) -> Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]:
    """What takes ``grads`` in place of new static gradients."""
    return lambda outputs: tuple(grad for grad in grads if grad is not None)


class _StaticGradients:
    """Lends static gradients of their outputs to slots."""

    def __init__(self) -> None:
        self._pool = BufferPool[tuple[torch.Tensor, ...]]()
        self._lent: dict[int, Lease[tuple[torch.Tensor, ...]]] = {}

    def lend(self, slot: int, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return gradients for the outputs of ``slot``, which keeps them until they are taken back."""
        key = tuple((output.shape, output.stride(), output.dtype, output.layout) for output in outputs)
        self._lent[slot] = self._pool.acquire(key, lambda: tuple(map(torch.zeros_like, outputs)))
        return self._lent[slot].buffers

    def take_back(self, slot: int) -> None:
        """Free the gradients of ``slot`` for the next slot with such outputs."""
        if slot in self._lent:
            self._pool.release(self._lent.pop(slot))
