"""How far a capture is: a progress bar in a terminal, otherwise a line of the log now and then."""

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("megatron.core.transformer.cuda_graphs")

_BETWEEN_LINES = 30.0  # seconds


class Progress:
    """Shows how many passes of a capture are done, and which comes next.

    The bar needs ``tqdm``, and that stderr is a terminal.

    Args:
        total: The number of passes; None if it is not known.
    """

    def __init__(self, total: int | None, clock: Callable[[], float] = time.monotonic):
        self._total, self._clock = total, clock
        self._begun, self._last_line = 0, clock()
        self._bar = _bar(total)

    def begin(self, what: str) -> None:
        """Say that a pass begins, and so that the one before is done."""
        self._begun += 1
        if self._bar is not None:
            self._bar.set_postfix_str(what, refresh=False)
            self._bar.update(int(self._begun > 1))
        elif self._clock() - self._last_line > _BETWEEN_LINES:
            self._last_line = self._clock()
            of = "" if self._total is None else f" of {self._total}"
            logger.info(f"CUDA graph capture: pass {self._begun}{of}, {what}")

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _bar(total: int | None) -> Any | None:
    if sys.stderr is None or getattr(sys.stderr, "closed", False) or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, desc="CUDA graphs", unit="pass", leave=False)
