"""Runs the passes of a plan over its slots, to warm up or to capture."""

import functools
from collections.abc import Sequence

import torch

from .buffers import BufferPool, Lease
from .capture import Capture, not_recording
from .plan import Pass, Plan
from .slot import SlotCapture


def run_passes(
    plan: Plan, slots: Sequence[SlotCapture], training: bool, shares_memory: bool, capture: Capture | None
) -> None:
    """Run the passes of ``plan`` over ``slots``, backward passes only in ``training``.

    Args:
        shares_memory: Whether graphs that are captured later may use memory that no later replay reads.
        capture: Records the passes; None for warm-up, which drops their results.
    """
    recording, phase = (not_recording, "warm-up") if capture is None else (capture.recording, "capture")
    static_grads = BufferPool[tuple[torch.Tensor, ...]]()
    lent: dict[int, Lease[tuple[torch.Tensor, ...]]] = {}  # by slot

    def lend(slot: int, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return static gradients for the outputs of ``slot``, which other slots get once it has given them back."""
        key = tuple((output.shape, output.stride(), output.dtype, output.layout) for output in outputs)
        lent[slot] = static_grads.acquire(key, lambda: tuple(map(torch.zeros_like, outputs)))
        return lent[slot].buffers

    last_steps, gradients_read = plan.last_steps(), plan.gradients_read()
    with_weight_gradients = {step.slot for step in plan.steps if step.kind is Pass.WEIGHT_GRADIENTS}
    for step in plan.steps:
        slot, kind = slots[step.slot], step.kind
        if kind is Pass.FORWARD or (training and (kind is Pass.BACKWARD or slot.delays_weight_gradients)):
            graph = None if capture is None else capture.new_graph()
            with torch.profiler.record_function(f"{slot.name} {kind.value} {phase}"):
                if kind is Pass.FORWARD:
                    slot.forward(recording, graph)
                elif kind is Pass.WEIGHT_GRADIENTS:
                    slot.weight_gradients(recording, graph)
                elif slot.delays_weight_gradients and step.slot not in with_weight_gradients:
                    raise ValueError(
                        f"{slot.name} delays its weight gradients, so _order must run them (-c - 0.5 for chunk c) "
                        "after its backward"
                    )
                else:
                    slot.backward(recording, functools.partial(lend, step.slot), graph)
        if not training:
            slot.detach_outputs()
        if capture is None:
            if kind is Pass.BACKWARD or not training:
                slot.drop_results()
        elif kind is not Pass.WEIGHT_GRADIENTS:
            slot.take_turn(capture.order, kind)
        if capture is not None and shares_memory and kind is Pass.BACKWARD:
            # Without training it did not run; nothing reads the outputs after its place in the plan.
            slot.release_outputs()
            for read in gradients_read.get(step, ()):
                slots[read].release_gradients()
        # Gradients that backward returns unchanged would be overwritten before they are read.
        if shares_memory and step in last_steps and step.slot in lent and not slot.returns_static_gradients:
            static_grads.release(lent.pop(step.slot))
