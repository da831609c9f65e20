"""Where the seconds of a capture go: each counts for the innermost of some functions that the host was in."""

import functools
import gc
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch

REST = "everything else"


class CapturePhases:
    """Counts seconds from ``begin`` to ``end``, by what the host did; nothing before and after."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._calls: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = 0.0

    def begin(self) -> None:
        """Count from now on."""
        self._since = time.perf_counter()
        self._open.append(REST)

    def end(self) -> None:
        """Count no more."""
        self._count()
        self._open.clear()

    def figures(self) -> dict[str, dict[str, float]]:
        """Milliseconds and calls, by what the host did, the longest first."""
        longest = sorted(self._seconds.items(), key=lambda item: -item[1])
        return {name: {"ms": round(1000 * took, 2), "calls": self._calls[name]} for name, took in longest}

    def install(self) -> None:
        """Watch the functions, for the life of the process."""
        from megatron.core.distributed.fsdp.src.megatron_fsdp._graphs.recorded_passes import RecordedPasses
        from megatron.core.transformer import cuda_graphs
        from megatron.core.transformer._cuda_graphs.engine.captured import GraphedCallable
        from megatron.core.transformer._cuda_graphs.snapshot import Snapshot
        from megatron.core.transformer._cuda_graphs.te import model
        from megatron.core.transformer._cuda_graphs.te.capture_state import CaptureState

        for owner, name, what in (
            (gc, "collect", "garbage collected"),
            (torch.cuda, "synchronize", "waited for the device"),
            (torch.cuda, "empty_cache", "cached memory returned"),
            (torch._C, "_cuda_memorySnapshot", "the allocator asked for its settings or memory"),
            (torch.cuda.CUDAGraph, "capture_begin", "captures begun"),
            (torch.cuda.CUDAGraph, "capture_end", "graphs instantiated"),
            (CaptureState, "choose", "what to capture decided"),
            (cuda_graphs, "report_capture", "report"),
            (cuda_graphs.TECudaGraphHelper, "_reset_after_capture", "gradients zeroed afterwards"),
            (Snapshot, "__init__", "what replays compare noted"),
            (RecordedPasses, "__init__", "units listed"),
            (model, "inputs_of_slots", "static inputs made"),
            (model, "capture_passes", "random numbers and buffers restored, streams, quantization"),
        ):
            self.watch(owner, name, lambda *_, what=what: what)
        for name in ("forward", "backward"):
            # None is given where nothing is recorded.
            self.watch(
                GraphedCallable,
                name,
                lambda *given, n=name: f"{n} {'warm-up' if given[1] is None else 'recorded'}",
            )

    def watch(self, owner: Any, name: str, what: Callable[..., str]) -> None:
        """Count the seconds in ``owner.name`` for what ``what`` returns, given its positional arguments."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._open:
                return function(*args, **kwargs)
            self._count()
            self._open.append(what(*args))
            self._calls[self._open[-1]] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._count()
                self._open.pop()

        setattr(owner, name, watched)

    def _count(self) -> None:
        now = time.perf_counter()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now
