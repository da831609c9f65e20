"""Records CUDA graphs over one memory pool, and recovers from captures that fail."""

import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress

import torch

from .preserve import pause_gc
from .replay import ReplayOrder
from .rng import current_rng_state, generator_states, preserve_rng, refuse_host_draws
from .streams import LEGACY_STREAM_ADVICE, capture_stream


@contextmanager
def capturing(*contexts: AbstractContextManager) -> Iterator[None]:
    """The context of warm-ups and captures: their stream, no garbage collection, random states restored.

    Args:
        contexts: Further ones, entered while the caller's stream is current.
    """
    with ExitStack() as stack:
        for context in (pause_gc(), preserve_rng(), *contexts, capture_stream()):
            stack.enter_context(context)
        yield


def record_nothing(make: Callable[[], torch.cuda.CUDAGraph], pool: tuple | None = None) -> torch.cuda.CUDAGraph:
    """Return a graph that ``make`` makes, after an empty capture on a stream of its own.

    Args:
        make: Called on that stream.
        pool: What the capture allocates from; None for a new pool.
    """
    with torch.cuda.stream(torch.cuda.Stream()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the graph is empty
        graph = make()
        _begin(graph, pool)
        graph.capture_end()
    return graph


def _begin(graph: torch.cuda.CUDAGraph, pool: tuple | None) -> None:
    # "thread_local": threads that pin memory or watch NCCL may go on.
    with _never_freed_after_an_error(graph):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")


@contextmanager
def _never_freed_after_an_error(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Never free ``graph`` if the context, in which it is registered with generators, ends with an exception.

    A registration allocates memory. If that fails, the graph knows the generator, and the generator does not know the
    graph, for which torch ends the process when the graph is freed.
    """
    try:
        yield
    except BaseException:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
        raise


def reclaim_memory_of_other_streams() -> None:
    """Let the next capture reuse memory of earlier captures that other streams no longer use.

    Autograd marks gradients as used on the stream of their AccumulateGrad node. If that is not the capture's stream,
    torch reuses their memory only after an event on the other stream has completed, and it checks events only at
    allocations outside of captures. Here the first allocation records the event, and the one after the
    synchronization finds it complete. ``torch.cuda.empty_cache`` would do the same, and takes longer
    (``benchmarks/capture_time.py``).
    """
    torch.empty(1, device="cuda")
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")


class Capture:
    """Records one graph after another on the current stream, over one memory pool.

    Args:
        pool: A handle of ``torch.cuda.graph_pool_handle``; None for a new pool.
        draws: Whether what is recorded may draw random numbers.

    Attributes:
        order: In what order the graphs are replayed.
    """

    def __init__(self, pool: tuple | None, draws: bool = True):
        self.order = ReplayOrder()
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._generators = [current_rng_state(), *generator_states()] if draws else []

    def new_graph(self) -> torch.cuda.CUDAGraph:
        """Return an empty graph with every generator registered."""
        graph = torch.cuda.CUDAGraph()
        # Registration allocates tensors that outlive this graph and may be written outside inference mode later.
        with torch.inference_mode(False), _never_freed_after_an_error(graph):
            for generator in self._generators:
                graph.register_generator_state(generator)
        return graph

    @contextmanager
    def recording(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record the work that the current stream is given in the context into ``graph``.

        Raises:
            RuntimeError: something in the context cannot be captured.
            UnsupportedError: random numbers of the host are drawn.
        """
        reclaim_memory_of_other_streams()
        try:
            _begin(graph, self.pool)
            with refuse_host_draws():
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
                warnings.simplefilter("ignore")  # torch warns if nothing was recorded yet
                graph.capture_end()
        except RuntimeError:  # CUDA refused before torch took allocator and generators out of capture mode
            self.recover()

    def recover(self) -> None:
        """Take the allocator and the generators out of capture mode, in which torch leaves both after a failure."""
        with suppress(RuntimeError):  # the capture had not begun, or was ended
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, self.pool)
            torch._C._cuda_releasePool(device, self.pool)
        # Only the end of a successful capture takes generators out of capture mode; an empty one will do.
        record_nothing(self.new_graph)


# Warm-up uses this in place of Capture.recording.
not_recording = nullcontext


def _explain(error: BaseException) -> None:
    text = str(error)
    if "StreamCaptureImplicit" in text or "legacy stream" in text or "previous error during capture" in text:
        error.add_note(LEGACY_STREAM_ADVICE)
