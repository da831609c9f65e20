"""Runs the passes of a plan over its slots: to warm up, then to capture."""

import functools
from collections.abc import Sequence

import torch

from .buffers import BufferPool, Lease
from .capture import Capture, not_recording
from .plan import Pass, Plan, Step
from .replay_order import ReplayOrder
from .slot import GraphedSlot


class CapturePasses:
    """The passes of one capture.

    Args:
        shares_memory: Whether graphs that are captured later may use memory that no later replay reads.
    """

    def __init__(self, plan: Plan, slots: Sequence[GraphedSlot], training: bool, shares_memory: bool):
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
        for step in self._plan.steps:
            slot = self._slots[step.slot]
            if self._runs(step):
                phase = "warm-up" if capture is None else "capture"
                with torch.profiler.record_function(f"{slot.name} {step.kind.value} {phase}"):
                    self._run_step(step, slot, grads, capture)
            elif capture is not None and self._shares_memory and step.kind is Pass.BACKWARD:
                slot.release_outputs()  # in evaluation, where no backward pass runs
            if capture is not None and step.kind is not Pass.WEIGHT_GRADIENTS:
                slot.take_turn(order, step.kind)
            # Gradients that backward returns unchanged would be overwritten before they are read.
            if self._shares_memory and step in self._last_steps and not slot.returns_static_gradients:
                grads.take_back(step.slot)

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
