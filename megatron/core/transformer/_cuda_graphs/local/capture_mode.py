"""The process while local graphs are warmed up and captured."""

from collections.abc import Iterator
from contextlib import contextmanager

from .. import state
from ..engine.preserve import pause_gc
from ..engine.rng import make_generators_safe, preserve_rng
from ..engine.streams import capture_stream
from ..engine.te_engine import transformer_engine_flag


@contextmanager
def capture_mode() -> Iterator[None]:
    """Say that graphs are being captured, on their own stream; generators and garbage collection are restored.

    No garbage is collected before: inference captures many graphs one by one, and it takes longer than that.
    """
    state._set_capture_start()
    try:
        with pause_gc(), preserve_rng(), transformer_engine_flag(), capture_stream():
            make_generators_safe()
            yield
    finally:
        state._set_capture_end()
