"""``torch.cuda.CUDAGraph`` on a tape."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from . import capture_state, pools, streams
from .capture_state import CaptureState
from .errors import INVALIDATED, NOT_PERMITTED, cuda_error
from .generators import DEFAULT, CudaGenerator, GeneratorState
from .patches import patch
from .tape import Recorder, Tape


class CUDAGraph:
    """A captured tape behind torch's interface.

    Attributes:
        replays: how often the graph was replayed since its capture.
    """

    def __new__(cls, keep_graph: bool = False) -> CUDAGraph:
        return super().__new__(cls)

    def __init__(self, keep_graph: bool = False) -> None:
        self.replays = 0
        self._tape: Tape | None = None
        self._recorder: Recorder | None = None
        self._generators: set[GeneratorState] = set()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles, as torch's class does: a graph is tied to its addresses.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"cannot pickle {type(self).__name__!r} object")

    @property
    def op_count(self) -> int:
        """How many operators a replay runs."""
        return 0 if self._tape is None else len(self._tape.steps)

    def capture_begin(
        self,
        pool: pools.PoolHandle | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        """Start recording the operators of the current stream.

        Args:
            pool: Where the graph's memory goes; a pool of its own by default.
            capture_error_mode: As torch names them; all are the same here.
            check_input_liveness: Accepted; every replay looks for memory that is gone.

        Raises:
            CaptureError: a capture is under way already.
            RuntimeError: this object holds a graph, the current stream is the legacy default stream, or
                ``capture_error_mode`` is none of "global", "thread_local", "relaxed".
        """
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(
                f"Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got {capture_error_mode}"
            )
        if self._tape is not None:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        running = capture_state.current()
        if running is not None:
            raise running.invalidate(cuda_error(NOT_PERMITTED, "capture_begin in a capture"))
        origin = streams.current_stream()
        if origin == streams.default_stream():
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, it's ok to replay "
                "them on the default stream.)"
            )
        tape = Tape(pools.pool_of(pool))
        state = CaptureState(origin, capture_error_mode, tape.memory)
        recorder = Recorder(tape, state, self._generators | {DEFAULT.state})
        recorder.__enter__()
        capture_state.set_current(state)
        self._recorder = recorder

    def capture_end(self) -> None:
        """Stop recording and undo what the capture computed.

        Raises:
            CaptureError: an operation in the capture was refused; the capture is void.
            RuntimeError: no capture of this graph is under way, or another stream is current than at its begin.
        """
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise RuntimeError("capture_end() was called without a capture_begin() of this graph")
        capture_state.set_current(None)
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
        """Run the graph's operators again, into the memory they had at capture.

        Raises:
            RuntimeError: nothing was captured, or the graph was reset.
            CaptureError: a capture is under way.
            StaleAddress: memory of the graph was freed, resized or moved since capture.
        """
        tape = self._captured()
        capture_state.refuse_while_capturing("CUDAGraph.replay")
        tape.replay()
        self.replays += 1

    def reset(self) -> None:
        """Drop the graph and its reference to its pool."""
        self._tape = None
        self.replays = 0

    def pool(self) -> pools.PoolHandle:
        """The handle of the graph's memory pool.

        Raises:
            RuntimeError: nothing was captured.
        """
        return self._captured().pool.handle

    def register_generator_state(self, generator: Any) -> None:
        """Let the capture draw from ``generator``'s state; the default generator's is always registered.

        Raises:
            TypeError: ``generator`` is no generator of the device.
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
    """Put the class in the place of torch's."""
    for owner in (torch.cuda, torch.cuda.graphs):
        patch(owner, "CUDAGraph", CUDAGraph, "captures are tapes")
        patch(owner, "graph_pool_handle", pools.new_handle, "pools are the tape's")
    patch(torch._C, "_host_emptyCache", lambda: None, "torch.cuda.graph calls it before a capture")
