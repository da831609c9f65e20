"""Records the operators of a capture below autograd, and runs them again.

During capture the operators compute, because Python goes on with their results. At the end what they wrote is undone:
memory from outside the capture gets its old bytes back, and memory allocated in it is filled with NaN (integers and
bools: zero), as if nothing had run.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from . import streams
from .addresses import AddressBook
from .capture_state import CaptureState
from .collectives import is_collective, make_collective_step, without_communication
from .errors import NOT_PERMITTED, UNJOINED, CaptureError, cuda_error
from .generators import GeneratorState
from .host_memory import is_host, is_pinned, making_host_tensor, mark_host
from .ops import Op, describe, waits_for_device
from .pools import Pool, poisoning

Step = Callable[[], Any]
# where a result goes: its place among the tensors that the operator returns, and the memory it had at capture
Targets = list[tuple[int, torch.Tensor]]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in ``tree``, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _make_step(func: torch._ops.OpOverload, args: tuple, kwargs: dict, targets: Targets) -> Step:
    """Return a call that runs ``func`` on ``args`` and puts its new results into ``targets``."""
    run = functools.partial(func._op, *args, **kwargs)
    if not targets:
        return run

    def step() -> None:
        results = tensors_in(run())
        for place, target in targets:
            target.copy_(results[place])

    return step


class Tape:
    """The recorded operators of one capture, and their memory."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.memory = AddressBook(pool)
        self.overwritten = pool.overwrite_abandoned()
        self.steps: list[Step] = []
        self.constants: list[torch.Tensor] = []

    def replay(self) -> None:
        """Run the recorded operators again, into the same memory.

        Raises:
            StaleAddress: memory of the tape was freed, resized or moved since capture.
        """
        self.memory.check()
        before = GeneratorState.active
        try:
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
                for fill in self.overwritten:
                    fill()
                for step in self.steps:
                    step()
        finally:
            before.load()


class Recorder(TorchDispatchMode):
    """Writes a tape while it is the active dispatch mode.

    Attributes:
        random_before: The states that the capture may draw from, each with its value before.
    """

    def __init__(self, tape: Tape, state: CaptureState, generators: set[GeneratorState]) -> None:
        super().__init__()
        self.tape, self.state = tape, state
        self.random_before = {g: g.get() for g in generators}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(t not in _PLAIN for t in types):
            return NotImplemented  # a tensor subclass: its own dispatch comes back here with the tensors inside
        if streams.current_stream() not in self.state.streams:
            return func(*args, **kwargs)
        op = describe(func)
        if op.name.startswith("profiler."):
            return func(*args, **kwargs)  # marks a range of host time
        inputs = tensors_in((args, kwargs))
        if not all(map(_has_memory, inputs)):
            return func(*args, **kwargs)
        # torch makes tensors of Python numbers and lists on the host, and lifts them
        if op.name.startswith("aten.lift_fresh") or (all(map(is_host, inputs)) if inputs else making_host_tensor()):
            out = func(*args, **kwargs)
            for tensor in tensors_in(out):
                mark_host(tensor)
            return out
        return self._record(func, op, inputs, args, kwargs)

    def _record(self, func, op: Op, inputs: list[torch.Tensor], args: tuple, kwargs: dict) -> Any:
        self._refuse(op, inputs, args, kwargs)
        if is_collective(func):
            return self._record_collective(func, op, inputs, args, kwargs)
        for place in op.written:
            written = kwargs.get(place) if isinstance(place, str) else (args[place] if place < len(args) else None)
            for tensor in tensors_in(written):
                self._keep_bytes(tensor, op)
        out = func(*args, **kwargs)
        known = {t.untyped_storage()._cdata for t in inputs}
        outputs = tensors_in(out)
        fresh = [(i, t) for i, t in enumerate(outputs) if _has_memory(t) and t.untyped_storage()._cdata not in known]
        for _, tensor in fresh:
            self.tape.memory.block(tensor, op.name, is_private=True)
        self._note_stream()
        if op.writes_nothing or not (fresh or op.written):
            return out
        targets = [(i, self.tape.memory.alias(t, op.name)) for i, t in fresh]
        step = _make_step(func, self._bind(args, op), self._bind(kwargs, op), targets)
        self.tape.steps.append(_drawing_from(GeneratorState.active, step) if op.is_random else step)
        return out

    def _record_collective(self, func, op: Op, inputs: list[torch.Tensor], args: tuple, kwargs: dict) -> Any:
        for tensor in inputs:  # the schemas do not tell which ones are written
            self._keep_bytes(tensor, op)
        out = without_communication(func, args, kwargs)
        self._note_stream()
        self.tape.steps.append(make_collective_step(func, self._bind(args, op), self._bind(kwargs, op)))
        return out

    def _note_stream(self) -> None:
        if self.state.origin != streams.current_stream():
            self.state.unjoined.add(streams.current_stream())

    def _refuse(self, op: Op, inputs: list[torch.Tensor], args: tuple, kwargs: dict) -> None:
        if waits_for_device(op, args, kwargs):
            raise self.state.invalidate(cuda_error(NOT_PERMITTED, op.name))
        if not op.is_replayable:
            raise self.state.invalidate(
                CaptureError(
                    f"{op.name} cannot be replayed by the CPU backend: it records aten operators and collectives"
                )
            )
        for tensor in inputs:
            if tensor.layout is not torch.strided:
                raise self.state.invalidate(
                    CaptureError(f"{op.name}: the CPU backend records strided tensors only, not {tensor.layout}")
                )
            if tensor.dim() > 0 and is_host(tensor) and not is_pinned(tensor):
                raise self.state.invalidate(
                    CaptureError(
                        f"{op.name} takes a host tensor of shape {tuple(tensor.shape)} together with device tensors in "
                        f"a CUDA graph capture. Make it with device='cuda' before the capture."
                    )
                )
        if op.is_random and GeneratorState.active not in self.random_before:
            raise self.state.invalidate(
                CaptureError(
                    f"Attempt to increase offset for a CUDA generator not in capture mode: {op.name} draws from a "
                    f"state that is not registered. Call graph.register_generator_state(generator) before the capture."
                )
            )

    def _keep_bytes(self, tensor: torch.Tensor, op: Op) -> None:
        block = self.tape.memory.block(tensor, op.name)
        if not block.is_private and block.before is None:
            block.before = block.raw.clone()

    def _bind(self, arguments: Any, op: Op) -> Any:
        return tree_map_only(torch.Tensor, lambda t: self._bound(t, op), arguments)

    def _bound(self, tensor: torch.Tensor, op: Op) -> torch.Tensor:
        if is_host(tensor) and not is_pinned(tensor):  # a scalar: its value goes into the launch, as on a GPU
            self.tape.constants.append(tensor.clone())
            return self.tape.constants[-1]
        return self.tape.memory.alias(tensor, op.name)

    def register(self, state: GeneratorState) -> None:
        """Let the rest of the capture draw from ``state``."""
        self.random_before.setdefault(state, state.get())

    def finish(self) -> None:
        """Undo what the capture computed and drew.

        Raises:
            CaptureError: a stream that joined the capture has work the origin stream did not wait for.
        """
        for block in self.tape.memory:
            if block.problem() is not None:
                continue
            if block.is_private:
                poisoning(block.raw, block.dtype)()
            elif block.before is not None:
                block.raw.copy_(block.before)
                block.before = None
        for state, value in self.random_before.items():
            state.set(value)
        if self.state.unjoined and self.state.error is None:
            raise cuda_error(UNJOINED)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is not one of the meta device, which has shapes only."""
    return tensor.device.type == "cpu"


def _drawing_from(state: GeneratorState, step: Step) -> Step:
    def draw() -> None:
        state.load()
        step()

    return draw
