"""The capture under way, if there is one, and its first error. A process has one capture at a time."""

import threading
from typing import Any

from .errors import NOT_PERMITTED, CaptureError, cuda_error


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


def current() -> CaptureState | None:
    """The capture under way in this process, or ``None``."""
    return _current


def set_current(state: CaptureState | None) -> None:
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
