"""Records CUDA graphs over one memory pool, and recovers from captures that fail."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from .rng import current_rng_state, generator_states
from .streams import LEGACY_STREAM_ADVICE


def recover_from_failed_capture(pool: tuple, capture: "Capture | None" = None) -> None:
    """Take the allocator and the generators out of capture mode, in which torch leaves both.

    Args:
        pool: The memory pool of the failed capture.
        capture: What recorded, if it was ours: its graphs know generators that are not in use where it failed.
    """
    with suppress(RuntimeError):  # where the capture had not begun, or could be ended
        device = torch.cuda.current_device()
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    # What takes generators out of capture mode is the end of a capture that succeeds: an empty one.
    with torch.cuda.stream(torch.cuda.Stream()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the graph is empty
        graph = (capture or Capture(None)).new_graph()
        graph.capture_begin(capture_error_mode="thread_local")
        graph.capture_end()


def reclaim_memory_of_other_streams() -> None:
    """Let the next capture use memory of earlier ones that other streams have been done with.

    Autograd marks gradients as used on the stream of their AccumulateGrad node. If that is not the stream of the
    capture, torch does not use their memory again before it has seen that the other stream is done with it, and does
    not look while a graph records. It looks at every allocation outside of captures: the first one notes what to wait
    for, one after that is over finds it done. ``torch.cuda.empty_cache`` would look too, and costs more
    (``benchmarks/capture_time.py``).
    """
    torch.empty(1, device="cuda")
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")


class Capture:
    """Records one graph after another on the current stream, over one memory pool.

    Args:
        pool: A handle of ``torch.cuda.graph_pool_handle``; None for a new pool.
    """

    def __init__(self, pool: tuple | None):
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._generators = [current_rng_state(), *generator_states()]

    def new_graph(self) -> torch.cuda.CUDAGraph:
        """Return an empty graph that knows every generator."""
        graph = torch.cuda.CUDAGraph()
        # Registration makes tensors, which outlive this graph and may be written outside inference mode later.
        with torch.inference_mode(False):
            for generator in self._generators:
                graph.register_generator_state(generator)
        return graph

    @contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record what the current stream is given into ``graph``.

        Raises:
            RuntimeError: something in the context cannot be captured.
        """
        reclaim_memory_of_other_streams()
        # "thread_local": threads that pin memory or watch NCCL may go on meanwhile.
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            yield
            graph.capture_end()
        except BaseException as error:
            _explain(error)
            try:
                self._abandon(graph)
            except Exception as another:
                error.add_note(f"What the failed capture left could not be cleaned up: {another}")
            raise

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture so that the allocator and the generators serve eager work again."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns where nothing had been recorded yet
                graph.capture_end()
        except RuntimeError:  # CUDA refused, before torch had told allocator and generators that capture is over
            recover_from_failed_capture(self.pool, self)


# What warm-up runs in place of Capture.recording.
not_recording = nullcontext


def _explain(error: BaseException) -> None:
    text = str(error)
    if "StreamCaptureImplicit" in text or "legacy stream" in text or "previous error during capture" in text:
        error.add_note(LEGACY_STREAM_ADVICE)
