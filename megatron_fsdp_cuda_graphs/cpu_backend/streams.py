"""Streams, events, and the capture under way, with the errors of CUDA.

Program order is execution order. A stream is an identity: the current one is tracked per thread, the legacy default
stream can be told apart, and streams join a capture through events as CUDA's do. Backward runs in the calling thread,
so the caller's stream is current in it; on a GPU it would be the stream of each forward operation.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import torch

from .patches import patch

NOT_PERMITTED = "operation not permitted when stream is capturing"
INVALIDATED = "operation failed due to a previous error during capture"
IMPLICIT = "operation would make the legacy stream depend on a capturing blocking stream"
ISOLATION = "dependency created on uncaptured work in another stream"
CAPTURED_EVENT = "operation not permitted on an event last recorded in a capturing stream"
UNJOINED = "capturing stream has unjoined work"
DEVICE = torch.device("cuda", 0)

_ids = itertools.count(1)
_thread = threading.local()


class CaptureError(torch.AcceleratorError):
    """An operation that a CUDA stream capture forbids. The capture it happened in is void."""


def cuda_error(message: str, detail: str = "") -> CaptureError:
    """Return the error CUDA would report as ``message``; ``detail`` says what caused it here."""
    return CaptureError(f"CUDA error: {message}" + (f" ({detail})" if detail else ""))


class CaptureState:
    """The streams a capture spans, the thread it began in, and the first error in it.

    A stream joins by waiting for an event of a stream that has joined. ``unjoined`` holds streams with recorded work
    that the origin stream has not waited for yet. ``memory`` is the address book of its tape.
    """

    def __init__(self, origin: Any, mode: str, memory: Any) -> None:
        self.origin, self.mode, self.memory = origin, mode, memory
        self.thread = threading.get_ident()
        self.streams = {origin}
        self.unjoined: set[Any] = set()
        self.error: CaptureError | None = None

    def invalidate(self, error: CaptureError) -> CaptureError:
        """Void the capture and return ``error`` for the caller to raise."""
        if self.error is None:
            self.error = error
        return error


_current: CaptureState | None = None


def current_capture() -> CaptureState | None:
    """The capture under way in this process, or ``None``."""
    return _current


def set_capture(state: CaptureState | None) -> None:
    """Begin (a state) or end (``None``) the capture of this process."""
    global _current
    _current = state


def refuse_while_capturing(what: str) -> None:
    """Raise CUDA's error if ``what``, a call that waits for the device, is made during a capture.

    Raises:
        CaptureError: a capture is under way in this thread, or in any thread with ``capture_error_mode="global"``.
    """
    state = _current
    if state is not None and (state.mode == "global" or state.thread == threading.get_ident()):
        raise state.invalidate(cuda_error(NOT_PERMITTED, what))


class Event:
    """A point in a stream's order, with the host time at which it was recorded.

    In a capture an ``external`` event is recorded and waited for by the graph's replays; it joins no streams.
    """

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
        **_: Any,
    ):
        self.enable_timing = enable_timing
        self.external = external
        self.time: float | None = None
        self.capture: CaptureState | None = None
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        self.time = time.perf_counter()
        state = current_capture()
        is_captured = state is not None and self.stream in state.streams and not self.external
        self.capture = state if is_captured else None

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        refuse_while_capturing("Event.query")
        self._refuse_if_captured("Event.query")
        return True

    def synchronize(self) -> None:
        refuse_while_capturing("Event.synchronize")
        self._refuse_if_captured("Event.synchronize")

    def _refuse_if_captured(self, what: str) -> None:
        # such an event is a place in a graph: outside of its capture it never happens
        if self.capture is not None and self.capture is not current_capture():
            raise cuda_error(CAPTURED_EVENT, what)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds between two recorded events.

        Raises:
            ValueError: an event was made without ``enable_timing=True``, or was not recorded.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'")
        if self.time is None or end_event.time is None:
            raise ValueError("Both events must be recorded before calculating elapsed time")
        return (end_event.time - self.time) * 1e3

    @property
    def device(self) -> torch.device:
        return DEVICE


class Stream:
    """A stream of the one device. ``cuda_stream`` is 0 for the legacy default stream alone."""

    def __init__(self, device: Any = None, priority: int = 0, *, _handle: int | None = None, **_: Any):
        self.cuda_stream = next(_ids) << 8 if _handle is None else _handle
        self.priority = priority
        self.device = DEVICE
        self.device_index = 0
        self.device_type = 1
        self.stream_id = self.cuda_stream >> 8

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -5)

    def wait_event(self, event: Event) -> None:
        """Order this stream's later work after ``event``; in a capture, join it.

        Raises:
            CaptureError: the legacy default stream would have to wait for a stream that is capturing, a stream that is
                capturing for one that is not, or the event is from a capture that has ended.
        """
        event._refuse_if_captured("Stream.wait_event")
        state = current_capture()
        if state is None or event.stream is None or event.external:
            return
        if event.capture is None:
            if self in state.streams:
                raise state.invalidate(cuda_error(ISOLATION, "Stream.wait_event"))
            return
        if self == _default:
            raise state.invalidate(cuda_error(IMPLICIT, "wait_event on the legacy default stream"))
        state.streams.add(self)
        if event.stream in state.unjoined:
            state.unjoined.discard(event.stream)
            if self != state.origin:
                state.unjoined.add(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        refuse_while_capturing("Stream.query")
        return True

    def synchronize(self) -> None:
        refuse_while_capturing("Stream.synchronize")

    def is_capturing(self) -> bool:
        """Whether it takes part in a capture."""
        state = current_capture()
        return state is not None and self in state.streams

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={DEVICE} cuda_stream={self.cuda_stream:#x}>"


_default = Stream(_handle=0)


def default_stream(device: Any = None) -> Stream:
    """The legacy default stream."""
    return _default


def current_stream(device: Any = None) -> Stream:
    """The stream that is current in this thread."""
    return getattr(_thread, "stream", _default)


def set_stream(stream: Stream | None) -> None:
    """Make ``stream`` current in this thread; ``None`` changes nothing."""
    if stream is not None:
        _thread.stream = stream


class StreamContext:
    """Makes a stream current for a block; ``None`` changes nothing."""

    def __init__(self, stream: Stream | None):
        self.stream = stream
        self.before: Stream | None = None

    def __enter__(self) -> Stream | None:
        self.before = current_stream()
        set_stream(self.stream)
        return self.stream

    def __exit__(self, *_: Any) -> None:
        set_stream(self.before)


def synchronize(device: Any = None) -> None:
    """Wait for nothing.

    Raises:
        CaptureError: a capture is under way.
    """
    refuse_while_capturing("torch.cuda.synchronize")


def is_current_stream_capturing() -> bool:
    """Whether the current stream takes part in a capture."""
    return current_stream().is_capturing()


def install() -> None:
    """Put the classes and functions of this file in the place of torch.cuda's."""
    why = "program order is execution order on the CPU; a stream is an identity"
    for owner in (torch.cuda, torch.cuda.streams):
        patch(owner, "Stream", Stream, why)
        patch(owner, "Event", Event, why)
    for name, value in {
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "synchronize": synchronize,
    }.items():
        patch(torch.cuda, name, value, why)
    patch(torch.accelerator, "current_stream", current_stream, why)
    # Loaders of data ask for it. That there is an accelerator stays: activation checkpointing keeps its generator.
    patch(torch.accelerator, "current_device_index", lambda: 0, why)
    patch(torch.accelerator, "set_device_index", lambda device: None, why)
    for owner in (torch.cuda, torch.cuda.graphs):
        patch(owner, "is_current_stream_capturing", is_current_stream_capturing, "captures are the tape's")
