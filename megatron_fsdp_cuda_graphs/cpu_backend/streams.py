"""Emulate streams, events and the capture in progress, with CUDA's errors.

Operations run in program order, whatever their streams. Each thread has a current stream, and streams join a
capture through events, as in CUDA. The backward pass runs in the calling thread on its current stream; on a GPU it
would use the stream of each forward operation.
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
    """Raised for an operation that a CUDA stream capture forbids. Invalidates the capture."""


def cuda_error(message: str, detail: str = "") -> CaptureError:
    """Return CUDA's error ``message``, with its cause in ``detail``."""
    return CaptureError(f"CUDA error: {message}" + (f" ({detail})" if detail else ""))


class CaptureState:
    """Streams, thread and first error of a capture in progress.

    A stream joins by waiting for an event of a joined stream.

    Attributes:
        unjoined: Streams with recorded work that the origin stream has not waited for.
        memory: Addresses that the tape uses.
    """

    def __init__(self, origin: Any, mode: str, memory: Any) -> None:
        self.origin, self.mode, self.memory = origin, mode, memory
        self.thread = threading.get_ident()
        self.streams = {origin}
        self.unjoined: set[Any] = set()
        self.error: CaptureError | None = None

    def invalidate(self, error: CaptureError) -> CaptureError:
        """Invalidate the capture, and return ``error`` for the caller to raise."""
        if self.error is None:
            self.error = error
        return error


_current: CaptureState | None = None


def current_capture() -> CaptureState | None:
    """Return the capture in progress in this process, or None."""
    return _current


def set_capture(state: CaptureState | None) -> None:
    """Begin the capture ``state``; None ends the current capture."""
    global _current
    _current = state


def refuse_while_capturing(what: str) -> None:
    """Reject the synchronizing call ``what`` during a capture.

    Raises:
        CaptureError: A capture is in progress in this thread, or in any thread with ``capture_error_mode="global"``.
    """
    state = _current
    if state is not None and (state.mode == "global" or state.thread == threading.get_ident()):
        raise state.invalidate(cuda_error(NOT_PERMITTED, what))


class Event:
    """Replaces ``torch.cuda.Event``; records the host time.

    Waiting for an ``external`` event does not join a capture.
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
        # The event of an ended capture never occurs.
        if self.capture is not None and self.capture is not current_capture():
            raise cuda_error(CAPTURED_EVENT, what)

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds between two recorded events.

        Raises:
            ValueError: An event was created without ``enable_timing=True``, or is not recorded.
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
    """Replaces ``torch.cuda.Stream``. ``cuda_stream`` is 0 for the legacy default stream."""

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
        """Wait for ``event``, and join its capture.

        Raises:
            CaptureError: The legacy default stream waits for a capturing stream, a capturing stream waits for a
                different one, or the capture of the event has ended.
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
        """Return whether this stream is part of a capture."""
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
    """Return the legacy default stream."""
    return _default


def current_stream(device: Any = None) -> Stream:
    """Return the current stream of this thread."""
    return getattr(_thread, "stream", _default)


def set_stream(stream: Stream | None) -> None:
    """Make ``stream`` current in this thread; do nothing for None."""
    if stream is not None:
        _thread.stream = stream


def synchronize(device: Any = None) -> None:
    """Replace ``torch.cuda.synchronize``.

    Raises:
        CaptureError: A capture is in progress.
    """
    refuse_while_capturing("torch.cuda.synchronize")


def is_current_stream_capturing() -> bool:
    """Return whether the current stream is part of a capture."""
    return current_stream().is_capturing()


def install() -> None:
    """Replace torch.cuda's streams and events."""
    for owner in (torch.cuda, torch.cuda.streams):
        patch(owner, "Stream", Stream)
        patch(owner, "Event", Event)
    for name, value in {
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "synchronize": synchronize,
    }.items():
        patch(torch.cuda, name, value)
    patch(torch.accelerator, "current_stream", current_stream)
    # Data loaders call these. The accelerator stays visible, because activation checkpointing saves its generator.
    patch(torch.accelerator, "current_device_index", lambda: 0)
    patch(torch.accelerator, "set_device_index", lambda device: None)
    for owner in (torch.cuda, torch.cuda.graphs):
        patch(owner, "is_current_stream_capturing", is_current_stream_capturing)
