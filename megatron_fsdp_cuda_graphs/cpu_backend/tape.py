"""Emulate ``torch.cuda.CUDAGraph``: record the operators of a capture below autograd, and replay them.

Operators run during capture, because Python needs their results. The end of the capture undoes their writes: it
restores memory from outside the capture, and fills memory allocated in the capture with NaN (integers and bools: zero).

Collectives transfer nothing during capture, and run in the order of the tape in each replay. A replay waits for its
peers, so ranks must replay the same graphs in the same order, as with NCCL. A capture does not wait for other ranks.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from . import memory, streams
from .generators import DEFAULT, CudaGenerator, GeneratorState
from .memory import AddressBook, Pool, is_host, is_pinned, making_host_tensor, mark_host, poisoning
from .patches import patch
from .streams import INVALIDATED, NOT_PERMITTED, UNJOINED, CaptureError, CaptureState, cuda_error

Step = Callable[[], Any]
Targets = list[tuple[int, torch.Tensor]]  # indices of results, and their memory at capture

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Operators that synchronize on a GPU, but have no tag for that in torch.
_SYNC = {"bincount", "histc", "is_nonzero", "item", "linalg_eig", "linalg_eigvals", "_linalg_check_errors"}
# Operators that convert bool masks to positions with nonzero.
_MASKABLE = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
# Operators that change the tensor object, not memory.
_METADATA = {"resize_", "resize_as_", "set_", "_resize_output_", "rename_", "requires_grad_", "detach_"}
_BARRIERS = {"barrier", "monitored_barrier_"}  # block the host until other ranks arrive


@dataclass(frozen=True)
class Op:
    """Properties of an operator overload.

    Attributes:
        name: Qualified name.
        is_replayable: Whether the tape can record it.
        waits_for_device: Whether its CUDA kernel synchronizes.
        is_maskable: Whether it accepts bool masks as indices.
        is_random: Whether it draws random numbers.
        writes_nothing: Whether it only allocates memory or changes metadata.
        written: Arguments that it writes: positions, or names of keyword-only arguments.
    """

    name: str
    is_replayable: bool
    waits_for_device: bool
    is_maskable: bool
    is_random: bool
    writes_nothing: bool
    written: tuple[int | str, ...]


@functools.cache
def describe(func: torch._ops.OpOverload) -> Op:
    """Return the properties of ``func``."""
    name = func._schema.name.split("::")[-1]
    tags = func.tags
    written: list[int | str] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else position)
    maskable = name in _MASKABLE
    dynamic = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
    return Op(
        name=str(func),
        is_replayable=func.namespace in ("aten", "prims") or is_collective(func),
        waits_for_device=name in _SYNC or (dynamic and not maskable),
        is_maskable=maskable,
        is_random=torch.Tag.nondeterministic_seeded in tags,
        writes_nothing=name in _ALLOCATES or name in _METADATA or torch.Tag.inplace_view in tags,
        written=tuple(written),
    )


def waits_for_device(op: Op, args: tuple, kwargs: dict) -> bool:
    """Return whether this call would synchronize with the device on a GPU."""
    if op.name == "aten.repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    return op.waits_for_device or (op.is_maskable and _needs_positions(op, args))


def _needs_positions(op: Op, args: tuple) -> bool:
    """Return whether an indexing call converts a mask to positions on the host.

    Writing one value through one mask does not: torch calls ``masked_fill``.
    """
    masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return False
    is_fill = "put" in op.name and len(masks) == sum(i is not None for i in args[1]) == 1 and args[2].numel() == 1
    accumulates = len(args) > 3 and args[3]
    return not (is_fill and not accumulates)


def is_collective(func: torch._ops.OpOverload) -> bool:
    """Return whether ``func`` is a collective that can be replayed."""
    return func.namespace == "c10d" and func._schema.name.split("::")[-1] not in _BARRIERS


def without_communication(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Any:
    """Return the result of the collective ``func`` without running it.

    Outputs keep their values, except integers, which become zero to be valid indices and sizes.
    """
    output = args[0] if args else next(iter(kwargs.values()))
    for tensor in tree_flatten(output)[0]:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            tensor.zero_()
    results = [FakeWork().boxed() if "Work" in str(kind.type) else output for kind in func._schema.returns]
    return tuple(results) if len(results) > 1 else next(iter(results), None)


def make_collective_step(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> Callable[[], None]:
    """Return a function that runs the collective ``func`` to completion."""
    call = func._op

    def step() -> None:
        for result in tree_flatten(call(*args, **kwargs))[0]:
            if isinstance(result, torch.ScriptObject):
                Work.unbox(result).wait()

    return step


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in ``tree``, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _make_step(func: torch._ops.OpOverload, args: tuple, kwargs: dict, targets: Targets) -> Step:
    """Return a function that runs ``func`` and then copies its newly allocated results to ``targets``."""
    run = functools.partial(func._op, *args, **kwargs)
    if not targets:
        return run

    def step() -> None:
        results = tensors_in(run())
        for place, target in targets:
            target.copy_(results[place])

    return step


class Tape:
    """Operators and memory of one capture."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.memory = AddressBook(pool)
        self.overwritten = pool.overwrite_abandoned()
        self.steps: list[Step] = []
        self.constants: list[torch.Tensor] = []

    def replay(self) -> None:
        """Run the recorded operators on the recorded memory.

        Raises:
            StaleAddress: Memory of the tape was freed, resized or moved since capture.
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
    """Dispatch mode that writes a tape.

    Attributes:
        random_before: Registered generator states, with their values before the capture.
    """

    def __init__(self, tape: Tape, state: CaptureState, generators: set[GeneratorState]) -> None:
        super().__init__()
        self.tape, self.state = tape, state
        self.random_before = {g: g.get() for g in generators}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(t not in _PLAIN for t in types):
            return NotImplemented  # tensor subclasses dispatch on their inner tensors
        if streams.current_stream() not in self.state.streams:
            return func(*args, **kwargs)
        op = describe(func)
        if op.name.startswith("profiler."):
            return func(*args, **kwargs)  # marks host time only
        inputs = tensors_in((args, kwargs))
        if not all(map(_has_memory, inputs)):
            return func(*args, **kwargs)
        # torch lifts tensors of Python data from the host.
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
        for tensor in inputs:  # schemas of collectives do not mark written arguments
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
                    f"the CPU backend records only aten operators and collectives: call {op.name} outside of captures"
                )
            )
        for tensor in inputs:
            if tensor.layout is not torch.strided:
                raise self.state.invalidate(
                    CaptureError(
                        f"the CPU backend does not record tensors of {tensor.layout}: call {op.name} outside captures"
                    )
                )
            if tensor.dim() > 0 and is_host(tensor) and not is_pinned(tensor):
                raise self.state.invalidate(
                    CaptureError(
                        f"{op.name} takes a host tensor of shape {tuple(tensor.shape)} together with device tensors in "
                        f"a CUDA graph capture. Create it with device='cuda' before the capture."
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
        if is_host(tensor) and not is_pinned(tensor):  # its value becomes a launch argument, as on a GPU
            self.tape.constants.append(tensor.clone())
            return self.tape.constants[-1]
        return self.tape.memory.alias(tensor, op.name)

    def register(self, state: GeneratorState) -> None:
        """Allow the rest of the capture to draw from ``state``."""
        self.random_before.setdefault(state, state.get())

    def finish(self) -> None:
        """End the capture: restore the memory that it wrote and the random states that it advanced.

        Raises:
            CaptureError: A joined stream has work that the origin stream did not wait for.
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
    """Return whether ``tensor`` is not on the meta device."""
    return tensor.device.type == "cpu"


def _drawing_from(state: GeneratorState, step: Step) -> Step:
    def draw() -> None:
        state.load()
        step()

    return draw


class CUDAGraph:
    """Replaces ``torch.cuda.CUDAGraph`` with a tape.

    Attributes:
        replays: Number of replays since capture.
    """

    def __new__(cls, keep_graph: bool = False) -> CUDAGraph:
        return super().__new__(cls)

    def __init__(self, keep_graph: bool = False) -> None:
        self.replays = 0
        self._tape: Tape | None = None
        self._recorder: Recorder | None = None
        self._generators: set[GeneratorState] = set()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reject copies and pickles, as torch does.

        Raises:
            TypeError: Always.
        """
        raise TypeError(f"cannot pickle {type(self).__name__!r} object")

    @property
    def op_count(self) -> int:
        """Number of operators in the graph."""
        return 0 if self._tape is None else len(self._tape.steps)

    def capture_begin(
        self,
        pool: memory.PoolHandle | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        """Start recording the operators of the current stream.

        Args:
            pool: Memory pool of the graph; None for a new pool.
            capture_error_mode: With "global", synchronizing calls are errors in all threads, otherwise in this one.
            check_input_liveness: Ignored; every replay checks all memory.

        Raises:
            CaptureError: A capture is already in progress.
            RuntimeError: This object has a graph, or the current stream is the legacy default stream.
        """
        if self._tape is not None:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        running = streams.current_capture()
        if running is not None:
            raise running.invalidate(cuda_error(NOT_PERMITTED, "capture_begin in a capture"))
        origin = streams.current_stream()
        if origin == streams.default_stream():
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay "
                "them on the default stream.)"
            )
        tape = Tape(memory.pool_of(pool))
        state = CaptureState(origin, capture_error_mode, tape.memory)
        recorder = Recorder(tape, state, self._generators | {DEFAULT.state})
        recorder.__enter__()
        streams.set_capture(state)
        self._recorder = recorder

    def capture_end(self) -> None:
        """Stop recording, and undo the writes of the capture.

        Raises:
            CaptureError: An operation in the capture was rejected.
            RuntimeError: This graph is not being captured, or the current stream is not the origin stream.
        """
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise RuntimeError("capture_end() was called without a capture_begin() of this graph")
        streams.set_capture(None)
        recorder.__exit__(None, None, None)
        state = recorder.state
        recorder.finish()
        if state.error is not None:
            raise cuda_error(INVALIDATED, str(state.error)) from state.error
        if streams.current_stream() != state.origin:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self._tape = recorder.tape
        recorder.tape.pool.add_graph()
        if not self.op_count:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong "
                "device or stream. On the CPU backend, tensors made without device='cuda' are host tensors.",
                stacklevel=2,
            )

    def replay(self) -> None:
        """Run the operators of the graph on its memory.

        Raises:
            RuntimeError: There is no captured graph.
            CaptureError: A capture is in progress.
            StaleAddress: Memory of the graph was freed, resized or moved since capture.
        """
        tape = self._captured()
        streams.refuse_while_capturing("CUDAGraph.replay")
        tape.replay()
        self.replays += 1

    def reset(self) -> None:
        """Delete the graph and its reference to the pool."""
        self._tape = None
        self.replays = 0

    def pool(self) -> memory.PoolHandle:
        """Return the handle of the memory pool.

        Raises:
            RuntimeError: There is no captured graph.
        """
        return self._captured().pool.handle

    def register_generator_state(self, generator: Any) -> None:
        """Allow the capture to draw from the state of ``generator``. The default state is always registered.

        Raises:
            TypeError: ``generator`` is not a generator of the device.
        """
        if not isinstance(generator, CudaGenerator):
            raise TypeError(f"register_generator_state() takes a CUDA generator, got {generator!r}")
        self._generators.add(generator.state)
        if self._recorder is not None:
            self._recorder.register(generator.state)

    def _captured(self) -> Tape:
        if self._tape is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        return self._tape


def install() -> None:
    """Replace ``torch.cuda.CUDAGraph``."""
    for owner in (torch.cuda, torch.cuda.graphs):
        patch(owner, "CUDAGraph", CUDAGraph)
        patch(owner, "graph_pool_handle", memory.new_handle)
    patch(torch._C, "_host_emptyCache", lambda: None)
